// The rows of a matrix in int8, for gate_pack's SCREEN, and how far they may be from it.               sm_90a, bfloat16
//
//   x: (M, K) bf16, K-contiguous     factors: (K) bf16, powers of two     rows: (M, K) i8     norms: (M) float2
//
// v = x * factors, a row's scale s = max|v| / 127, and its row in int8 q = round(v / s). Its norms, in units of s:
//   n = |v| + |v - s q|       e = |v - s q| + (K + 64) 2^-24 n
// The product of two rows is then at most e n' + n e' from that of their q: by Cauchy and Schwarz,
// |v v' - q q'| <= |v - q| |v'| + |q| |v' - q'|. The terms with 2^-24 are for what is rounded in float32: v / s, the
// products of a row that is computed again, and what the bound is compared with. Norms are rounded up by 2^-10.
// A row that is not finite, or so large or small that float32 sums of its products may not be, has no bound: both norms
// are Inf.
//
// A warp has a row, in registers (of more than 5,120 values some are spilled).
// Macros: screen.py's `quantise_macros`.
#include "ptx.cuh"

constexpr int CHUNKS = (K + 255) / 256;
constexpr float ROUND = 0x1.8p23f;  // a float plus this one is rounded to an integer, which is in the lowest bits
static_assert(K % 64 == 0, "rows are read and written 16 and 8 bytes at a time");

struct Params {
  const char *x, *factors;
  u8* rows;
  float2* norms;
  long long x_stride;  // bytes
  int M;
};
#include "params_check.cuh"  // made by compiler.py from params.py: offsets and sizes are those of the Python side

// Exact up to overflow: bfloat16 has fewer small numbers than float32.
__device__ __forceinline__ void scaled(float (&v)[8], uint4 x, uint4 f) {
  v[0] = low_half(x.x) * low_half(f.x), v[1] = high_half(x.x) * high_half(f.x);
  v[2] = low_half(x.y) * low_half(f.y), v[3] = high_half(x.y) * high_half(f.y);
  v[4] = low_half(x.z) * low_half(f.z), v[5] = high_half(x.z) * high_half(f.z);
  v[6] = low_half(x.w) * low_half(f.w), v[7] = high_half(x.w) * high_half(f.w);
}

__device__ __forceinline__ u32 four_bytes(const u32 (&q)[8], int first) {
  const u32 low = __byte_perm(q[first], q[first + 1], 0x0040), high = __byte_perm(q[first + 2], q[first + 3], 0x0040);
  return __byte_perm(low, high, 0x5410);
}

__device__ __forceinline__ float sum_over_warp(float s) {
#pragma unroll
  for (int d = 16; d; d /= 2) s += __shfl_xor_sync(~0u, s, d);
  return s;
}

extern "C" __global__ void __launch_bounds__(WARPS * 32) quantise(const __grid_constant__ Params p) {
  const int lane = threadIdx.x % 32, row = blockIdx.x * WARPS + threadIdx.x / 32;
  if (row >= p.M) return;
  uint4 x[CHUNKS];
  float v[8];
  u32 largest = 0;  // of |v|; as integers, NaN is above Inf
#pragma unroll
  for (int j = 0; j < CHUNKS; j++) {
    const int column = j * 256 + lane * 8;
    x[j] = column < K ? load_once(p.x + row * p.x_stride + column * 2) : make_uint4(0, 0, 0, 0);
  }
#pragma unroll
  for (int j = 0; j < CHUNKS; j++) {
    const int column = j * 256 + lane * 8;
    if (column >= K) continue;
    scaled(v, x[j], load_weights(p.factors + column * 2));
#pragma unroll
    for (int i = 0; i < 8; i++) largest = max(largest, __float_as_uint(v[i]) & 0x7fffffff);
  }
  const float most = __uint_as_float(__reduce_max_sync(~0u, largest));
  const bool bounded = most > 0x1p-57f && most < 0x1p57f;
  const float inverse = bounded ? 127 / most : 0;
  float sum = 0, lost = 0;  // squares
#pragma unroll
  for (int j = 0; j < CHUNKS; j++) {
    const int column = j * 256 + lane * 8;
    if (column >= K) continue;
    u32 q[8];  // in the lowest byte
    scaled(v, x[j], load_weights(p.factors + column * 2));
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const float exact = v[i] * inverse, shifted = exact + ROUND, d = exact - (shifted - ROUND);
      q[i] = __float_as_uint(shifted);
      sum = fmaf(exact, exact, sum), lost = fmaf(d, d, lost);
    }
    *(uint2*)(p.rows + (u64)row * K + column) = make_uint2(four_bytes(q, 0), four_bytes(q, 4));
  }
  sum = sqrtf(sum_over_warp(sum)), lost = sqrtf(sum_over_warp(lost));
  const float n = (sum + lost) * (1 + 0x1p-10f), e = lost * (1 + 0x1p-10f) + (K + 64) * 0x1p-24f * n;
  const float none = __uint_as_float(most == 0 ? 0 : 0x7f800000);  // a row of zeros needs no bound
  if (lane == 0) p.norms[row] = bounded ? make_float2(n, e) : make_float2(none, none);
}
