// h = relu(x gate^T) * (x up^T) for few tokens (M <= TOKENS), where reading the weights is all that takes time.
// Without a gate: h = relu(x up^T). SQUARED: relu(z)^2 in place of relu(z).           sm_90a, bfloat16, float32 sums
//
//   x: (M, K)     gate, up, down: (N, K)     h: (M, N)     active: (M, words of 32 neurons), a bit for each non-zero
//
// A thread block has 16 neurons and splits K over its warps. It reads all of gate, and of up only the rows of neurons
// that some token activates. SCAN: it also looks for Inf and NaN in its rows of up and down; such neurons count as
// active for every token, since their products with zeros are NaN. down is not read otherwise.
#include "ptx.cuh"

constexpr int TILE = 16, THREADS = WARPS * 32, COLUMNS = TOKENS / 8;
constexpr int CHUNKS = K / 64, STEPS = (CHUNKS + WARPS - 1) / WARPS;  // a chunk is 64 of K: 32 bytes a thread and row

struct Params {
  const char *x, *gate, *up, *down;  // gate: the weights that decide, up itself without a gate
  char* h;
  u32* active;
  long long x_stride, gate_stride;  // bytes
  int M, N;
};
#include "params_check.cuh"  // made by compiler.py from params.py: offsets and sizes are those of the Python side

__device__ __forceinline__ void copy_16(u32 to, const char* from) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
template <int PENDING>
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}
__device__ __forceinline__ uint4 load_shared_by_blocks(const char* from) {
  uint4 v;
  asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from));
  return v;
}
__device__ __forceinline__ void multiply(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

typedef float Sums[COLUMNS][4];

// Starts to copy rows of the tile to shared memory. Each thread later reads what it copied itself. present: bit i, row i.
__device__ __forceinline__ void start_copies(const char* weights, u64 stride, int first, u32 present, u32 slot) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = lane / 4, quarter = lane % 4;
#pragma unroll
  for (int i = 0; i < STEPS; i++) {
    const int chunk = warp + i * WARPS;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int at = half * 8 + row;
      const char* from = weights + (u64)(first + at) * stride + chunk * 128 + quarter * 16;
      const u32 to = slot + (i * 4 + half * 2) * (THREADS * 16);
      if ((CHUNKS % WARPS == 0 || chunk < CHUNKS) && (present >> at & 1)) {
        copy_16(to, from);
        copy_16(to + THREADS * 16, from + 64);
      }
    }
    asm volatile("cp.async.commit_group;");
  }
}

// Adds the products of chunk STEP and those after it. The order along K is not that in memory, but the same for both.
template <int STEP>
__device__ __forceinline__ void add_products(Sums& sums, const Params& p, u32 present, u32 slot) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = lane / 4, quarter = lane % 4;
  const int chunk = warp + STEP * WARPS;
  wait_for_copies<STEPS - 1 - STEP>();
  if (CHUNKS % WARPS == 0 || chunk < CHUNKS) {
    uint4 w[4];
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const bool there = present >> (j / 2 * 8 + row) & 1;
      w[j] = there ? load_shared(slot + (STEP * 4 + j) * (THREADS * 16)) : make_uint4(0, 0, 0, 0);
    }
#pragma unroll
    for (int c = 0; c < COLUMNS; c++) {
      const int token = c * 8 + row;
      uint4 x[2] = {make_uint4(0, 0, 0, 0), make_uint4(0, 0, 0, 0)};
      if (token < p.M) {
        const char* from = p.x + token * p.x_stride + chunk * 128 + quarter * 16;
        x[0] = load_shared_by_blocks(from), x[1] = load_shared_by_blocks(from + 64);
      }
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const uint4 top = w[half], bottom = w[2 + half];
        multiply(sums[c], top.x, bottom.x, top.y, bottom.y, x[half].x, x[half].y);
        multiply(sums[c], top.z, bottom.z, top.w, bottom.w, x[half].z, x[half].w);
      }
    }
  }
  if constexpr (STEP + 1 < STEPS) add_products<STEP + 1>(sums, p, present, slot);
}

// The product of rows of the tile with x, as partial sums of the warps in shared memory.
typedef float Partial[TOKENS][TILE + 1];
__device__ __forceinline__ void product(const Params& p, u32 present, u32 slot, Partial* partial) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = lane / 4, quarter = lane % 4;
  Sums sums = {};
  add_products<0>(sums, p, present, slot);
  __syncthreads();  // the copies have been read: the sums take their memory
#pragma unroll
  for (int c = 0; c < COLUMNS; c++) {
    const int token = c * 8 + quarter * 2;
    partial[warp][token][row] = sums[c][0], partial[warp][token + 1][row] = sums[c][1];
    partial[warp][token][row + 8] = sums[c][2], partial[warp][token + 1][row + 8] = sums[c][3];
  }
  __syncthreads();
}
__device__ __forceinline__ float total(const Partial* partial, int token, int neuron) {
  float sum = 0;
#pragma unroll
  for (int i = 0; i < WARPS; i++) sum += partial[i][token][neuron];
  return sum;
}
__device__ __forceinline__ float rounded(float v) { return low_half(to_halves(v, 0)); }

extern "C" __global__ void __launch_bounds__(THREADS) few_gate(const __grid_constant__ Params p) {
  extern __shared__ uint4 dynamic[];          // the copies, then the partial sums
  __shared__ float values[TOKENS][TILE + 1];  // relu(z), or its square
  __shared__ u32 masks[TOKENS], wanted;       // by token: its active neurons of the tile; and those of any token
  Partial* partial = (Partial*)dynamic;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, first = blockIdx.x * TILE;
  const u32 slot = smem_address(dynamic) + threadIdx.x * 16;
  const u32 all = first + TILE <= p.N ? (1u << TILE) - 1 : (1u << (p.N - first)) - 1;
#if EARLY
  let_next_kernel_start();
#endif
  start_copies(p.gate, p.gate_stride, first, all, slot);
  if (threadIdx.x == 0) wanted = 0;
  u32 bad = 0;
#if SCAN
  __shared__ u32 nonfinite;
  if (threadIdx.x == 0) nonfinite = 0;
  __syncthreads();
  for (int n = warp; n < TILE; n += WARPS) {
    if (!(all >> n & 1)) break;
    u32 full = 0;
    for (int at = lane * 16; at < K * 2; at += 512) {
      full |= exponent_is_full(load_once(p.down + (u64)(first + n) * (K * 2) + at));
      if (GATED) full |= exponent_is_full(load_once(p.up + (u64)(first + n) * (K * 2) + at));
    }
    if (__any_sync(~0u, full != 0) && lane == 0) atomicOr(&nonfinite, 1u << n);
  }
  __syncthreads();
  bad = nonfinite;
#endif
  product(p, all, slot, partial);
  for (int i = threadIdx.x; i < TILE * TOKENS; i += THREADS) {
    const int neuron = i % TILE, token = i / TILE;
    const float z = rounded(total(partial, token, neuron));
    const float g = z <= 0 ? 0 : z;  // NaN stays NaN
    values[token][neuron] = SQUARED ? g * g : g;
    // u may be Inf or NaN where z is -Inf: plain torch makes NaN of its product with zero.
    const bool on = token < p.M && (all >> neuron & 1) && (!(z <= 0) || (GATED && z < -3.4e38f) || (bad >> neuron & 1));
    const u32 ballot = __ballot_sync(~0u, on);
    if (lane % TILE == 0) {  // a warp has the neurons of two tokens
      const u32 mine = ballot >> lane & 0xffff;
      masks[token] = mine;
      if (mine) atomicOr(&wanted, mine);
    }
  }
  __syncthreads();
  // A word of `active` has 32 neurons: two blocks write a half each. The last block also zeroes what follows its own.
  u16* active = (u16*)p.active;
  const int halves = (p.N + 31) / 32 * 2;
  for (int i = threadIdx.x; i < p.M * 2; i += THREADS) {
    const int token = i / 2, half = i % 2, at = blockIdx.x + half;
    const bool mine = half == 0 || blockIdx.x == gridDim.x - 1;
    if (mine && at < halves) active[token * halves + at] = half == 0 ? (u16)masks[token] : 0;
  }
#if GATED
  if (wanted) {
    start_copies(p.up, K * 2, first, wanted, slot);
    product(p, wanted, slot, partial);
  }
#endif
#if !EARLY
  let_next_kernel_start();
#endif
  for (int i = threadIdx.x; i < TILE / 2 * p.M; i += THREADS) {
    const int neuron = i % (TILE / 2) * 2, token = i / (TILE / 2);
    if (!(all >> neuron & 1)) continue;
    float h[2];
#pragma unroll
    for (int j = 0; j < 2; j++) {
      const bool on = masks[token] >> (neuron + j) & 1;
      h[j] = on ? values[token][neuron + j] * (GATED ? total(partial, token, neuron + j) : 1.f) : 0;
    }
    u16* to = (u16*)p.h + (u64)token * p.N + first + neuron;
    const u32 both = to_halves(h[0], h[1]);
    to[0] = (u16)both;
    if (all >> (neuron + 1) & 1) to[1] = (u16)(both >> 16);
  }
}
