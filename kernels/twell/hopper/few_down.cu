// y = h down on the non-zeros of h, for few tokens.                          sm_90a, bfloat16, float32 sums
//
//   found: (M, blocks, 2 * PAIRS) and counts: (M, blocks), as few_gate.cu leaves them     down: (N, K)     y: (M, K)
//
// A thread block has 16 columns of y. Each token has a warp, or several if there are fewer tokens than warps: each lists
// the token's non-zeros, and adds up its part of their pieces of down, 16 of them side by side.
// Macros: few.py's `down_macros`.
#include "ptx.cuh"

constexpr int COLUMNS = 16, ACROSS = COLUMNS / 8, AT_ONCE = 32 / ACROSS, AHEAD = 4, THREADS = WARPS * 32;
constexpr int GROUP_MOST = 64 * PAIRS;  // non-zeros of 32 blocks of few_gate

struct Params {
  const u32 *found, *counts;
  const char* down;
  char* y;
  int M, blocks;
};
#include "params_check.cuh"  // made by compiler.py from params.py: offsets and sizes are those of the Python side

__device__ __forceinline__ void add_scaled(float (&to)[8], float factor, uint4 v) {
  to[0] = fmaf(factor, low_half(v.x), to[0]), to[1] = fmaf(factor, high_half(v.x), to[1]);
  to[2] = fmaf(factor, low_half(v.y), to[2]), to[3] = fmaf(factor, high_half(v.y), to[3]);
  to[4] = fmaf(factor, low_half(v.z), to[4]), to[5] = fmaf(factor, high_half(v.z), to[5]);
  to[6] = fmaf(factor, low_half(v.w), to[6]), to[7] = fmaf(factor, high_half(v.w), to[7]);
}

extern "C" __global__ void __launch_bounds__(THREADS) few_down(const __grid_constant__ Params p) {
  constexpr int ROOM = LIST > GROUP_MOST ? LIST : GROUP_MOST;
  extern __shared__ u32 lists[];  // (WARPS, ROOM)
  __shared__ float sums[WARPS][COLUMNS];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, across = lane % ACROSS, entry = lane / ACROSS;
  const int column = blockIdx.x * COLUMNS + across * 8;
  int parts = 1;
  while (parts * 2 * p.M <= WARPS) parts *= 2;
  const int token = warp / parts, part = warp % parts;
  u32* list = lists + warp * ROOM;
  float sum[8] = {};
  wait_for_kernels_ahead();
  if (token < p.M) {
    const u32* counts = p.counts + (u64)token * p.blocks;
    const uint2* found = (const uint2*)p.found + (u64)token * p.blocks * PAIRS;
    // All counts, and the first two non-zeros of every block whether there are any or not: one way to memory and back.
    u32 mine[GROUPS];
    uint2 first[GROUPS];
#pragma unroll
    for (int g = 0; g < GROUPS; g++) {
      const int block = g * 32 + lane;
      mine[g] = block < p.blocks ? counts[block] : 0;
      first[g] = block < p.blocks ? found[block * PAIRS] : make_uint2(0, 0);
    }
    int count = 0;
#pragma unroll
    for (int g = 0; g < GROUPS; g++) {
      int upto = mine[g];
#pragma unroll
      for (int offset = 1; offset < 32; offset *= 2) {
        const int other = __shfl_up_sync(~0u, upto, offset);
        if (lane >= offset) upto += other;
      }
      u32* to = list + count + upto - mine[g];
      if (mine[g] > 0) to[0] = first[g].x;
      if (mine[g] > 1) to[1] = first[g].y;
      for (int i = 2; i < mine[g]; i += 2) {
        const uint2 two = found[(g * 32 + lane) * PAIRS + i / 2];
        to[i] = two.x;
        if (i + 1 < mine[g]) to[i + 1] = two.y;
      }
      count += __shfl_sync(~0u, upto, 31);
      __syncwarp();
      if (g + 1 < GROUPS && count <= ROOM - GROUP_MOST) continue;
      for (int from = part * (AHEAD * AT_ONCE) + entry; from < count; from += parts * (AHEAD * AT_ONCE)) {
        uint4 piece[AHEAD];
        float factor[AHEAD];
#pragma unroll
        for (int a = 0; a < AHEAD; a++) {
          const u32 one = list[min(from + a * AT_ONCE, count - 1)];
          factor[a] = high_half(one);
          piece[a] = load_weights(p.down + ((u64)(one & 0xffff) * K + column) * 2);
        }
#pragma unroll
        for (int a = 0; a < AHEAD; a++)
          if (from + a * AT_ONCE < count) add_scaled(sum, factor[a], piece[a]);
      }
      count = 0;
      __syncwarp();
    }
#pragma unroll
    for (int offset = ACROSS; offset < 32; offset *= 2)
#pragma unroll
      for (int i = 0; i < 8; i++) sum[i] += __shfl_xor_sync(~0u, sum[i], offset);
  }
  if (parts > 1) {
    if (entry == 0)
#pragma unroll
      for (int i = 0; i < 8; i++) sums[warp][across * 8 + i] = sum[i];
    __syncthreads();
    for (int other = 1; part == 0 && other < parts; other++)
#pragma unroll
      for (int i = 0; i < 8; i++) sum[i] += sums[warp + other][across * 8 + i];
  }
  if (token < p.M && part == 0 && entry == 0)
    *(uint4*)(p.y + ((u64)token * K + column) * 2) = make_uint4(to_halves(sum[0], sum[1]), to_halves(sum[2], sum[3]),
                                                                to_halves(sum[4], sum[5]), to_halves(sum[6], sum[7]));
}
