// The rows of a matrix in int8, for gate_pack's SCREEN, and how far they may be from it.               sm_90a, bfloat16
//
//   x: (M, K) bf16, K-contiguous     factors: (K) bf16, powers of two     rows: (M, K) i8     norms: (M) float2
//
// v = x * factors, a row's scale s = max|v| / 127, and its row in int8 q = round(v / s). Its norms, in units of s:
//   n = |v| + |v - s q|       e = |v - s q| + (K + 64) 2^-24 n
// The product of two rows is then at most e n' + n e' from that of their q: by Cauchy and Schwarz,
// |v v' - q q'| <= |v - q| |v'| + |q| |v' - q'|. The terms with 2^-24 are for what is rounded: v / s, v where it is
// below 2^-126, the products of a row that is computed again in float32, and what the bound is compared with. Norms are
// rounded up by 2^-10.
// A row that is not finite, or so large or small that float32 sums of its products may not be, has no bound: both norms
// are Inf.
//
// A warp has a row, in registers.
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

// Two bfloat16 in a word each. Exact up to overflow and for results of at least 2^-126.
__device__ __forceinline__ u32 product_of_halves(u32 v, u32 w) {
  asm("mul.rn.bf16x2 %0, %0, %1;" : "+r"(v) : "r"(w));
  return v;
}
__device__ __forceinline__ u32 largest_of_halves(u32 largest, u32 v) {
  asm("{\n.reg .b32 size;\nabs.bf16x2 size, %1;\nmax.NaN.bf16x2 %0, %0, size;\n}" : "+r"(largest) : "r"(v));
  return largest;
}

// Squares: of the values of a row, and, in units of s, of what their integers leave out.
struct Sums {
  float size = 0, lost = 0;
};
// The nearest integer to v * inverse, in the lowest byte.
__device__ __forceinline__ u32 rounded(float v, float inverse, Sums& sums) {
  const float shifted = fmaf(v, inverse, ROUND), lost = fmaf(v, inverse, ROUND - shifted);
  sums.size = fmaf(v, v, sums.size), sums.lost = fmaf(lost, lost, sums.lost);
  return __float_as_uint(shifted);
}
__device__ __forceinline__ u32 four_bytes(u32 v, u32 w, float inverse, Sums& sums) {
  const u32 low = __byte_perm(rounded(low_half(v), inverse, sums), rounded(high_half(v), inverse, sums), 0x0040);
  const u32 high = __byte_perm(rounded(low_half(w), inverse, sums), rounded(high_half(w), inverse, sums), 0x0040);
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
  uint4 v[CHUNKS];
#pragma unroll
  for (int j = 0; j < CHUNKS; j++) {
    const int column = j * 256 + lane * 8;
    v[j] = column < K ? load_once(p.x + row * p.x_stride + column * 2) : make_uint4(0, 0, 0, 0);
  }
  u32 largest = 0;
#pragma unroll
  for (int j = 0; j < CHUNKS; j++) {
    const int column = j * 256 + lane * 8;
    if (column >= K) continue;
    const uint4 f = load_weights(p.factors + column * 2);
    largest = largest_of_halves(largest, v[j].x = product_of_halves(v[j].x, f.x));
    largest = largest_of_halves(largest, v[j].y = product_of_halves(v[j].y, f.y));
    largest = largest_of_halves(largest, v[j].z = product_of_halves(v[j].z, f.z));
    largest = largest_of_halves(largest, v[j].w = product_of_halves(v[j].w, f.w));
  }
  largest = max(largest << 16, largest & 0xffff0000u);  // as integers, NaN is above Inf
  const float most = __uint_as_float(__reduce_max_sync(~0u, largest));
  const bool bounded = most > 0x1p-57f && most < 0x1p57f;
  const float inverse = bounded ? 127 / most : 0;
  Sums sums;
#pragma unroll
  for (int j = 0; j < CHUNKS; j++) {
    const int column = j * 256 + lane * 8;
    if (column >= K) continue;
    *(uint2*)(p.rows + (u64)row * K + column) =
        make_uint2(four_bytes(v[j].x, v[j].y, inverse, sums), four_bytes(v[j].z, v[j].w, inverse, sums));
  }
  const float size = sqrtf(sum_over_warp(sums.size)) * inverse, lost = sqrtf(sum_over_warp(sums.lost));
  const float n = (size + lost) * (1 + 0x1p-10f), e = lost * (1 + 0x1p-10f) + (K + 64) * 0x1p-24f * n;
  const float none = __uint_as_float(most == 0 ? 0 : 0x7f800000);  // a row of zeros needs no bound
  if (lane == 0) p.norms[row] = bounded ? make_float2(n, e) : make_float2(none, none);
}
