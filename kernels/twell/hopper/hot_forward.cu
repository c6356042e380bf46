// Hot neurons: g = relu(pre) in place, h = g * u, and their part of the statistics.                   sm_90a, bfloat16
// SQUARED: h = g^2 * u.
//
//   pre: (M, 2H), the gate's products and then u; without a gate (GATED = 0) (M, H)
//   h: (M, H); not written where it is g: neither GATED nor SQUARED
//
// A warp takes a row, eight columns a lane at a time.
// Macros: hot_steps.py's `macros`.
#include "ptx.cuh"

struct Params {
  char *pre, *h;           // h: GATED or SQUARED only
  const long long* hot;    // (H): which neurons these are
  int* nonzeros;           // (M), STATS only: theirs are added, up to N
  float* l1;               // (M), STATS only: their sum of |h|, on top of what is there if `added`
  const float* l1_weight;  // (H), WEIGHTED only
  u8* fired;               // (N), STATS only
  int M, H, N, added;
};
#include "params_check.cuh"  // made by compiler.py from params.py: offsets and sizes are those of the Python side

__device__ __forceinline__ float relu(float v) { return v <= 0 ? 0 : v; }  // NaN stays NaN

// h of g = relu(z) and u.
__device__ __forceinline__ float hidden(float g, float u) {
  const float a = SQUARED ? g * g : g;
  return GATED ? a * u : a;
}

__device__ __forceinline__ void mark(const Params& p, int column) {
  const long long n = p.hot[column];
  if (n >= 0 && n < p.N && !p.fired[n]) p.fired[n] = 1;
}

extern "C" __global__ void __launch_bounds__(WARPS * 32) hot_forward(const __grid_constant__ Params p) {
  const int lane = threadIdx.x % 32, row = blockIdx.x * WARPS + threadIdx.x / 32;
  if (row >= p.M) return;
  char* pre = p.pre + (u64)row * p.H * (GATED ? 4 : 2);
  int count = 0;
  float sum = 0;
  for (int c = lane * 8; c < p.H; c += 256) {
    const uint4 before = *(const uint4*)(pre + c * 2);
    const uint4 up = GATED ? load_once(pre + (p.H + c) * 2) : make_uint4(0, 0, 0, 0);
    const u32 words[4] = {before.x, before.y, before.z, before.w}, ups[4] = {up.x, up.y, up.z, up.w};
    u32 g[4], h[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const float low = relu(low_half(words[i])), high = relu(high_half(words[i]));
      const float h_low = hidden(low, low_half(ups[i])), h_high = hidden(high, high_half(ups[i]));
      g[i] = to_halves(low, high), h[i] = to_halves(h_low, h_high);
      if constexpr (STATS) {
        count += (low != 0) + (high != 0);
        sum += WEIGHTED ? fabsf(h_low) * p.l1_weight[c + 2 * i] + fabsf(h_high) * p.l1_weight[c + 2 * i + 1]
                        : fabsf(h_low) + fabsf(h_high);
        if (low != 0) mark(p, c + 2 * i);
        if (high != 0) mark(p, c + 2 * i + 1);
      }
    }
    *(uint4*)(pre + c * 2) = make_uint4(g[0], g[1], g[2], g[3]);
    if constexpr (GATED || SQUARED) *(uint4*)(p.h + ((u64)row * p.H + c) * 2) = make_uint4(h[0], h[1], h[2], h[3]);
  }
  if constexpr (STATS) {
    count = __reduce_add_sync(~0u, count);
#pragma unroll
    for (int d = 16; d; d /= 2) sum += __shfl_xor_sync(~0u, sum, d);
    // A token with NaN fires every neuron, hot or not.
    if (lane == 0) p.nonzeros[row] = min(p.nonzeros[row] + count, p.N), p.l1[row] = (p.added ? p.l1[row] : 0) + sum;
  }
}
