// y = h down on the non-zeros of h, for few tokens.                                              sm_90a, bfloat16, float32 sums
//
//   h: (M, N) and active: (M, words of 32 neurons), as few_gate.cu leaves them     down: (N, K)     y: (M, K)
//
// A thread block has 16 columns of y, and a warp one token at a time: it lists the token's active neurons, then adds up their
// pieces of down, 16 of them side by side.
#include "ptx.cuh"

constexpr int COLUMNS = 16, ACROSS = COLUMNS / 8, AT_ONCE = 32 / ACROSS, AHEAD = 4, THREADS = TOKENS * 32;

struct Params {
  const char *h, *down;
  const u32* active;
  char* y;
  int M, N;
};
#include "params_check.cuh"  // made by compiler.py from params.py: offsets and sizes are those of the Python side

__device__ __forceinline__ void add_scaled(float (&to)[8], float factor, uint4 v) {
  to[0] = fmaf(factor, low_half(v.x), to[0]), to[1] = fmaf(factor, high_half(v.x), to[1]);
  to[2] = fmaf(factor, low_half(v.y), to[2]), to[3] = fmaf(factor, high_half(v.y), to[3]);
  to[4] = fmaf(factor, low_half(v.z), to[4]), to[5] = fmaf(factor, high_half(v.z), to[5]);
  to[6] = fmaf(factor, low_half(v.w), to[6]), to[7] = fmaf(factor, high_half(v.w), to[7]);
}

extern "C" __global__ void __launch_bounds__(THREADS) few_down(const __grid_constant__ Params p) {
  extern __shared__ u16 lists[];  // (TOKENS, LIST)
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, across = lane % ACROSS, entry = lane / ACROSS;
  const int column = blockIdx.x * COLUMNS + across * 8, words = (p.N + 31) / 32;
  u16* list = lists + warp * LIST;
  wait_for_kernels_ahead();
  for (int token = warp; token < p.M; token += TOKENS) {
    const u32* active = p.active + (u64)token * words;
    const u16* h = (const u16*)p.h + (u64)token * p.N;
    float sum[8] = {};
    int count = 0;
    for (int from = 0; from < words; from += 32) {
      u32 word = from + lane < words ? active[from + lane] : 0;
      const int mine = __popc(word);
      int upto = mine;
#pragma unroll
      for (int offset = 1; offset < 32; offset *= 2) {
        const int other = __shfl_up_sync(~0u, upto, offset);
        if (lane >= offset) upto += other;
      }
      int at = count + upto - mine;
      for (; word; word &= word - 1) list[at++] = (u16)((from + lane) * 32 + __ffs(word) - 1);
      count += __shfl_sync(~0u, upto, 31);
      __syncwarp();
      // 32 words add at most 1024 entries.
      if (from + 32 < words && count <= LIST - 1024) continue;
      for (int from = entry; from < count; from += AHEAD * AT_ONCE) {
        uint4 piece[AHEAD];
        float factor[AHEAD];
#pragma unroll
        for (int a = 0; a < AHEAD; a++) {
          const int i = from + a * AT_ONCE, neuron = list[min(i, count - 1)];
          factor[a] = low_half(h[neuron]);
          piece[a] = load_weights(p.down + ((u64)neuron * K + column) * 2);
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
    if (entry == 0)
      *(uint4*)(p.y + ((u64)token * K + column) * 2) = make_uint4(to_halves(sum[0], sum[1]), to_halves(sum[2], sum[3]),
                                                                  to_halves(sum[4], sum[5]), to_halves(sum[6], sum[7]));
  }
}
