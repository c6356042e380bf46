// h = relu(x gate^T) * (x up^T) for few tokens (M <= TOKENS), where reading the weights is all that takes time.
// Without a gate: h = relu(x up^T). SQUARED: relu(z)^2 in place of relu(z).           sm_90a, bfloat16, float32 sums
//
//   x: (M, K)     gate, up, down: (N, K)     found: (M, blocks, 2 * PAIRS), non-zeros, each neuron + (h << 16)
//   counts: (M, blocks), non-zeros of each token in each block's neurons, in their order
//
// One thread block for each processor, with ROWS neurons, which splits K over its warps and keeps x in registers. It reads
// all of gate, in tiles of 16 rows of which SLOTS are under way, and of up only the rows of neurons that some token
// activates, in tiles too. Of down it only asks the L2 cache for the rows to come.
// Macros: few.py's `gate_macros`.
#include "ptx.cuh"

constexpr int TILE = 16, THREADS = WARPS * 32, COLUMNS = TOKENS / 8, TILES = (ROWS + TILE - 1) / TILE;
constexpr int CHUNKS = K / 64, STEPS = (CHUNKS + WARPS - 1) / WARPS;  // a chunk is 64 of K: 32 bytes a thread and row
constexpr bool WHOLE = CHUNKS % WARPS == 0;
constexpr int SLOT_BYTES = STEPS * 4 * THREADS * 16;

struct Params {
  const char *x, *gate, *up, *down;  // gate: the weights that decide, up itself without a gate
  u32 *found, *counts;
  long long x_stride, gate_stride;  // bytes
  int M, N;
};
#include "params_check.cuh"  // made by compiler.py from params.py: offsets and sizes are those of the Python side

__device__ __forceinline__ void copy_16(u32 to, const char* from) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void end_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING>
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}
__device__ __forceinline__ uint4 load_shared_by_blocks(const char* from) {
  uint4 v;
  asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from));
  return v;
}
__device__ __forceinline__ void ask_for(const char* line) { asm volatile("prefetch.global.L2 [%0];" ::"l"(line)); }
__device__ __forceinline__ void multiply(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// The warp's share of x. The order along K is not that in memory, but the same as that of the weights.
typedef uint4 Tokens[STEPS][COLUMNS][2];
__device__ __forceinline__ void load_tokens(Tokens& x, const Params& p) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = lane / 4, quarter = lane % 4;
#pragma unroll
  for (int i = 0; i < STEPS; i++)
#pragma unroll
    for (int c = 0; c < COLUMNS; c++) {
      const int chunk = warp + i * WARPS, token = c * 8 + row;
      const char* from = p.x + token * p.x_stride + chunk * 128 + quarter * 16;
      const bool there = (WHOLE || chunk < CHUNKS) && token < p.M;
      x[i][c][0] = there ? load_shared_by_blocks(from) : make_uint4(0, 0, 0, 0);
      x[i][c][1] = there ? load_shared_by_blocks(from + 64) : make_uint4(0, 0, 0, 0);
    }
}

// Starts to copy a tile of rows to a slot of shared memory: `low` and `high` are this thread's rows, null if there is
// none. Each thread later reads what it copied itself. Every call is one group of copies, even an empty one.
__device__ __forceinline__ void start_copies(const char* low, const char* high, u32 slot) {
  const int warp = threadIdx.x / 32, quarter = threadIdx.x % 4;
#pragma unroll
  for (int i = 0; i < STEPS; i++) {
    const int chunk = warp + i * WARPS;
    if (!WHOLE && chunk >= CHUNKS) break;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const char* from = half ? high : low;
      const u32 to = slot + (i * 4 + half * 2) * (THREADS * 16);
      if (from) {
        copy_16(to, from + chunk * 128 + quarter * 16);
        copy_16(to + THREADS * 16, from + chunk * 128 + quarter * 16 + 64);
      }
    }
  }
  end_group();
}

// The product of the tile in a slot with x, as a partial sum of each warp in shared memory.
typedef float Partial[TOKENS][TILE + 1];
__device__ __forceinline__ void product(const Tokens& x, bool low, bool high, u32 slot, Partial* partial) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = lane / 4, quarter = lane % 4;
  float sums[COLUMNS][4] = {};
#pragma unroll
  for (int i = 0; i < STEPS; i++) {
    if (!WHOLE && warp + i * WARPS >= CHUNKS) break;
    uint4 w[4];
#pragma unroll
    for (int j = 0; j < 4; j++)
      w[j] = (j < 2 ? low : high) ? load_shared(slot + (i * 4 + j) * (THREADS * 16)) : make_uint4(0, 0, 0, 0);
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const uint4 top = w[half], bottom = w[2 + half];
#pragma unroll
      for (int c = 0; c < COLUMNS; c++) {
        multiply(sums[c], top.x, bottom.x, top.y, bottom.y, x[i][c][half].x, x[i][c][half].y);
        multiply(sums[c], top.z, bottom.z, top.w, bottom.w, x[i][c][half].z, x[i][c][half].w);
      }
    }
  }
#pragma unroll
  for (int c = 0; c < COLUMNS; c++) {
    const int token = c * 8 + quarter * 2;
    partial[warp][token][row] = sums[c][0], partial[warp][token + 1][row] = sums[c][1];
    partial[warp][token][row + 8] = sums[c][2], partial[warp][token + 1][row + 8] = sums[c][3];
  }
}
__device__ __forceinline__ float total(const Partial* partial, int token, int neuron) {
  float sum = 0;
#pragma unroll
  for (int i = 0; i < WARPS; i++) sum += partial[i][token][neuron];
  return sum;
}
__device__ __forceinline__ float rounded(float v) { return low_half(to_halves(v, 0)); }

extern "C" __global__ void __launch_bounds__(THREADS, 1) few_gate(const __grid_constant__ Params p) {
  extern __shared__ uint4 dynamic[];                  // SLOTS tiles of weights, then two sets of partial sums
  __shared__ float values[TILES * TILE][TOKENS + 1];  // relu(z), or its square
  __shared__ u16 masks[TILES][TOKENS];                // active neurons of each token in each tile
  __shared__ u32 wanted[TILES];                       // those of any token
  __shared__ u16 list[TILES * TILE];                  // wanted neurons, in their order
  __shared__ int wanted_count;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = lane / 4;
  const int first = blockIdx.x * ROWS, rows = min(ROWS, p.N - first), tiles = (rows + TILE - 1) / TILE;
  const u32 slots = smem_address(dynamic) + threadIdx.x * 16;
  Partial* partials = (Partial*)((char*)dynamic + SLOTS * SLOT_BYTES);
#if EARLY
  let_next_kernel_start();
#endif
  const char* gate = p.gate + (u64)first * p.gate_stride;
  auto start_gate = [&](int tile) {
    const int low = tile * TILE + row, high = low + 8;
    start_copies(low < rows ? gate + (u64)low * p.gate_stride : nullptr,
                 high < rows ? gate + (u64)high * p.gate_stride : nullptr, slots + tile % SLOTS * SLOT_BYTES);
  };
  for (int tile = 0; tile < SLOTS; tile++) start_gate(tile);
  Tokens x;
  load_tokens(x, p);
  for (int i = threadIdx.x; i < TILES; i += THREADS) wanted[i] = 0;
  __syncthreads();
  for (int tile = 0; tile < tiles; tile++) {
    Partial* partial = partials + tile % 2 * WARPS;
    wait_for_copies<SLOTS - 1>();
    product(x, tile * TILE + row < rows, tile * TILE + row + 8 < rows, slots + tile % SLOTS * SLOT_BYTES, partial);
    start_gate(tile + SLOTS);
    __syncthreads();
    for (int i = threadIdx.x; i < TILE * TOKENS; i += THREADS) {
      const int neuron = i % TILE, token = i / TILE;
      const float z = rounded(total(partial, token, neuron));
      const float g = z <= 0 ? 0 : z;  // NaN stays NaN
      values[tile * TILE + neuron][token] = SQUARED ? g * g : g;
      // u may be Inf or NaN where z is -Inf: plain torch makes NaN of its product with zero.
      const bool there = token < p.M && tile * TILE + neuron < rows;
      const bool on = there && (!(z <= 0) || (GATED && z < -3.4e38f));
      const u32 mine = __ballot_sync(~0u, on) >> (lane & 16) & 0xffff;  // a warp has the neurons of two tokens
      if (neuron == 0) {
        masks[tile][token] = (u16)mine;
        if (mine) atomicOr(&wanted[tile], mine);
      }
    }
  }
  wait_for_copies<0>();  // the groups left are empty
  __syncthreads();
  if (warp == 0) {
    int count = 0;
    for (int tile = 0; tile < tiles; tile++) {
      const u32 some = wanted[tile];
      if (some >> lane & 1) list[count + __popc(some & ((1u << lane) - 1))] = (u16)(tile * TILE + lane);
      count += __popc(some);
    }
    if (lane == 0) wanted_count = count;
  }
  __syncthreads();
  const int count = wanted_count;
  auto start_up = [&](int tile) {
    const int low = tile * TILE + row, high = low + 8;
    start_copies(low < count ? p.up + (u64)(first + list[low]) * (K * 2) : nullptr,
                 high < count ? p.up + (u64)(first + list[high]) * (K * 2) : nullptr,
                 slots + tile % SLOTS * SLOT_BYTES);
  };
  if (GATED)
    for (int tile = 0; tile < SLOTS; tile++) start_up(tile);
  for (int i = warp; i < count; i += WARPS)
    for (int at = lane * 128; at < K * 2; at += 32 * 128) ask_for(p.down + (u64)(first + list[i]) * (K * 2) + at);
#if !EARLY
  let_next_kernel_start();
#endif
  // Half a warp has the neurons of one token: it counts that token's non-zeros as it writes them.
  static_assert(THREADS >= TILE * TOKENS, "each thread has one neuron of one token");
  const int neuron = threadIdx.x % TILE, token = threadIdx.x / TILE;
  const bool mine = token < p.M && token < TOKENS;
  u32* found = p.found + ((u64)token * gridDim.x + blockIdx.x) * (2 * PAIRS);
  int before = 0;
  for (int tile = 0; tile * TILE < count; tile++) {
    Partial* partial = partials + tile % 2 * WARPS;
    if (GATED) {
      wait_for_copies<SLOTS - 1>();
      product(x, tile * TILE + row < count, tile * TILE + row + 8 < count, slots + tile % SLOTS * SLOT_BYTES, partial);
      start_up(tile + SLOTS);
      __syncthreads();
    }
    const int at = tile * TILE + neuron, n = at < count ? list[at] : 0;
    const bool on = mine && at < count && masks[n / TILE][token] >> n % TILE & 1;
    const u32 ballot = __ballot_sync(~0u, on) >> (lane & 16) & 0xffff;
    if (on) {
      const float h = values[n][token] * (GATED ? total(partial, token, neuron) : 1.f);
      found[before + __popc(ballot & ((1u << neuron) - 1))] = (u32)(first + n) | to_halves(0, h);
    }
    before += __popc(ballot);
  }
  if (mine && neuron == 0) p.counts[(u64)token * gridDim.x + blockIdx.x] = before;
}
