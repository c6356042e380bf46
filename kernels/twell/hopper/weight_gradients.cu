// The neurons' side of the backward: dup = du^T @ x, dgate = dg^T @ x, ddown = h^T @ dy.        sm_90a, bfloat16, float32 sums
//
//   x, dy: (M, K) bf16     records: {token, du, dg, h}, by neuron, then by token     dup, dgate, ddown: (N, K) bf16
//
// A task is one neuron and SLICE columns: for each record a warp reads that part of one row of x and one of dy. All tasks of
// one slice run before those of the next, so that the slices of x and dy at work stay in L2. Neurons with more than FREQUENT
// records come first and are taken by a whole CTA.
// Macros: backward.py's `WEIGHT_MACROS`.
#include "ptx.cuh"

constexpr int COLUMNS = SLICE / 32, LOADS = COLUMNS / 8, SLICES = (K + SLICE - 1) / SLICE;
constexpr int OUTPUTS = GATED ? 3 : 2, TICKET = 4;
constexpr u32 ROW_BYTES = K * 2;

struct Params {
  const char *x, *dy;
  const uint4* records;
  const u32* ends;                // (N)
  const u32* frequent;            // neurons with more than FREQUENT records
  u32* counters;                  // [0]: how many these are; [2], [3]: zero at the start; [5]: of dy
  const u32* nonfinite;           // of x, as counters[5]: not zero: NaN or Inf may be missing from the records
  char *dup, *dgate, *ddown;      // each may be null
  long long x_stride, dy_stride;  // bytes
  int N;
};
#include "params_check.cuh"  // made by compiler.py from params.py: offsets and sizes are those of the Python side

struct Sums {
  float up[COLUMNS], gate[GATED ? COLUMNS : 1], down[COLUMNS];
};

__device__ __forceinline__ int column(int slice, int j, int lane) { return slice * SLICE + j * 256 + lane * 8; }
__device__ __forceinline__ bool inside(int slice, int j, int lane) {
  return K % SLICE == 0 || column(slice, j, lane) < K;
}

__device__ __forceinline__ void add_scaled(float* to, float factor, uint4 v) {
  to[0] = fmaf(factor, low_half(v.x), to[0]), to[1] = fmaf(factor, high_half(v.x), to[1]);
  to[2] = fmaf(factor, low_half(v.y), to[2]), to[3] = fmaf(factor, high_half(v.y), to[3]);
  to[4] = fmaf(factor, low_half(v.z), to[4]), to[5] = fmaf(factor, high_half(v.z), to[5]);
  to[6] = fmaf(factor, low_half(v.w), to[6]), to[7] = fmaf(factor, high_half(v.w), to[7]);
}

__device__ __forceinline__ void clear(Sums& s) {
#pragma unroll
  for (int i = 0; i < COLUMNS; i++) s.up[i] = s.down[i] = 0;
  if constexpr (GATED) {
#pragma unroll
    for (int i = 0; i < COLUMNS; i++) s.gate[i] = 0;
  }
}

// Records first..last - 1 of a neuron.
__device__ __forceinline__ void add_records(const Params& p, Sums& s, uint4* list, u32 first, u32 last, int slice,
                                            int lane) {
  const bool with_x = p.dup || p.dgate, with_dy = p.ddown;
  if (first >= last) return;
  uint4 next = p.records[min(first + lane, last - 1)];
  for (; first < last; first += 32) {
    const int n = min(32u, last - first);
    // A record past the end repeats a token with factors of zero.
    if (lane >= n) next.y = next.z = next.w = 0;
    __syncwarp();
    list[lane] = next;
    __syncwarp();
    next = p.records[min(first + 32 + lane, last - 1)];
    for (int i = 0; i < n; i += AHEAD) {
      uint4 r[AHEAD], x[AHEAD][LOADS], dy[AHEAD][LOADS];
#pragma unroll
      for (int a = 0; a < AHEAD; a++) {
        r[a] = list[i + a];
#pragma unroll
        for (int j = 0; j < LOADS; j++) {
          const int at = column(slice, j, lane) * 2;
          const bool in = inside(slice, j, lane);
          x[a][j] = with_x && in ? load_once(p.x + r[a].x * p.x_stride + at) : make_uint4(0, 0, 0, 0);
          dy[a][j] = with_dy && in ? load_once(p.dy + r[a].x * p.dy_stride + at) : make_uint4(0, 0, 0, 0);
        }
      }
#pragma unroll
      for (int a = 0; a < AHEAD; a++) {
#pragma unroll
        for (int j = 0; j < LOADS; j++) {
          add_scaled(s.up + 8 * j, __uint_as_float(r[a].y), x[a][j]);
          if constexpr (GATED) add_scaled(s.gate + 8 * j, __uint_as_float(r[a].z), x[a][j]);
          add_scaled(s.down + 8 * j, __uint_as_float(r[a].w), dy[a][j]);
        }
      }
    }
  }
}

__device__ __forceinline__ void store(char* matrix, const float* v, int neuron, int slice, int lane) {
  if (!matrix) return;
#pragma unroll
  for (int j = 0; j < LOADS; j++, v += 8)
    if (inside(slice, j, lane))
      store_once(
          matrix + (u64)neuron * ROW_BYTES + column(slice, j, lane) * 2,
          make_uint4(to_halves(v[0], v[1]), to_halves(v[2], v[3]), to_halves(v[4], v[5]), to_halves(v[6], v[7])));
}

__device__ __forceinline__ void store(const Params& p, Sums& s, int neuron, int slice, int lane) {
  if (*p.nonfinite | p.counters[5]) {
#pragma unroll
    for (int i = 0; i < COLUMNS; i++) s.up[i] = s.down[i] = __uint_as_float(0x7fffffff);
    if constexpr (GATED) {
#pragma unroll
      for (int i = 0; i < COLUMNS; i++) s.gate[i] = __uint_as_float(0x7fffffff);
    }
  }
  store(p.dup, s.up, neuron, slice, lane);
  if constexpr (GATED) store(p.dgate, s.gate, neuron, slice, lane);
  store(p.ddown, s.down, neuron, slice, lane);
}

// The warps' sums in their order, in warp 0.
__device__ __forceinline__ void add_warps(Sums& s, float* exchange) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int half = WARPS / 2, warps = WARPS; warps > 1; warps = half, half = (warps + 1) / 2) {
    if (half * 2 < warps) half++;
    __syncthreads();
    if (warp >= half && warp < warps) {
      float* to = exchange + (warp - half) * OUTPUTS * SLICE + lane;
#pragma unroll
      for (int i = 0; i < COLUMNS; i++) {
        to[32 * i] = s.up[i], to[SLICE + 32 * i] = s.down[i];
        if constexpr (GATED) to[2 * SLICE + 32 * i] = s.gate[i];
      }
    }
    __syncthreads();
    if (warp + half < warps) {
      const float* from = exchange + warp * OUTPUTS * SLICE + lane;
#pragma unroll
      for (int i = 0; i < COLUMNS; i++) {
        s.up[i] += from[32 * i], s.down[i] += from[SLICE + 32 * i];
        if constexpr (GATED) s.gate[i] += from[2 * SLICE + 32 * i];
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(WARPS * 32, 1) weight_gradients(const __grid_constant__ Params p) {
  __shared__ uint4 lists[WARPS][32];
  __shared__ u32 ticket;
  extern __shared__ float exchange[];  // (WARPS / 2, OUTPUTS, SLICE)
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  Sums s;
  const u32 frequent = p.counters[0];
  while (true) {
    __syncthreads();
    if (threadIdx.x == 0) ticket = atomicAdd(&p.counters[2], 1);
    __syncthreads();
    if (ticket >= frequent * SLICES) break;
    const int neuron = p.frequent[ticket % frequent], slice = ticket / frequent;
    const u32 begin = neuron ? p.ends[neuron - 1] : 0, end = p.ends[neuron], share = (end - begin + WARPS - 1) / WARPS;
    clear(s);
    add_records(p, s, lists[warp], min(begin + warp * share, end), min(begin + (warp + 1) * share, end), slice, lane);
    add_warps(s, exchange);
    if (warp == 0) store(p, s, neuron, slice, lane);
  }
  const u32 tickets = (p.N + TICKET - 1) / TICKET;
  while (true) {
    u32 mine = 0;
    if (lane == 0) mine = atomicAdd(&p.counters[3], 1);
    mine = __shfl_sync(~0u, mine, 0);
    if (mine >= tickets * SLICES) break;
    const int slice = mine / tickets;
    for (int i = 0; i < TICKET; i++) {
      const int neuron = mine % tickets * TICKET + i;
      if (neuron >= p.N) break;
      const u32 begin = neuron ? p.ends[neuron - 1] : 0, end = p.ends[neuron];
      if (end - begin > FREQUENT) continue;
      clear(s);
      add_records(p, s, lists[warp], begin, end, slice, lane);
      store(p, s, neuron, slice, lane);
    }
  }
}
