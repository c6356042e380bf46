// The rows of hot neurons, copied side by side (SCATTER = 0) or back to where they belong (1).         sm_90a, bfloat16
//
//   hot: (H) int64, distinct     matrices: gate, up, down (N, K)     parts: (H, K) of each, for those that are not null
//
// With `cold` also the other rows of the pattern's matrix (the gate; up without one), side by side, and which neurons
// they are:
//
//   cold: (N - H, K)     neurons: (N - H, rounded up to 256) u16
//
// Every thread block makes that list for itself, which takes less time than to wait for another; then each copies its
// share. Where a neuron occurs twice in hot, all these rows become NaN, and so does the part of a neuron that does not
// exist: nothing is lost unseen.
// Macros: hot_steps.py's `rows_macros`.
#include "ptx.cuh"

constexpr int THREADS = WARPS * 32, PADDING = 256, MOST_WORDS = 65536 / 32, PIECES = 4;

struct Params {
  const long long* hot;
  char *matrices[3], *parts[3];
  char* cold;
  u16* neurons;
  int H, N, K;
};
#include "params_check.cuh"  // made by compiler.py from params.py: offsets and sizes are those of the Python side

// One warp copies a row of so many bytes, four pieces of each lane at a time. source: null for a row of NaN.
__device__ __forceinline__ void copy_row(char* to, const char* source, int bytes) {
  for (int at = threadIdx.x % 32 * 16; at < bytes; at += PIECES * 512) {
    uint4 v[PIECES];
#pragma unroll
    for (int i = 0; i < PIECES; i++) {
      v[i] = make_uint4(0x7fff7fff, 0x7fff7fff, 0x7fff7fff, 0x7fff7fff);
      if (source && at + i * 512 < bytes) v[i] = load_once(source + at + i * 512);
    }
#pragma unroll
    for (int i = 0; i < PIECES; i++)
      if (at + i * 512 < bytes) store_once(to + at + i * 512, v[i]);
  }
}

__device__ __forceinline__ u32 not_marked(const u32* marked, int w, int N) {
  return ~marked[w] & (w * 32 + 32 <= N ? ~0u : (1u << N % 32) - 1);
}

extern "C" __global__ void __launch_bounds__(THREADS) hot_rows(const __grid_constant__ Params p) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, bytes = p.K * 2;
  const int first = blockIdx.x * WARPS + warp, step = gridDim.x * WARPS;
  for (int row = first; row < 3 * p.H; row += step) {
    const int matrix = row / p.H, i = row % p.H;
    char *whole = p.matrices[matrix], *part = p.parts[matrix];
    if (!whole || !part) continue;
    const long long n = p.hot[i];
    const bool exists = n >= 0 && n < p.N;
    whole += n * bytes, part += (u64)i * bytes;
    if constexpr (SCATTER) {
      if (exists) copy_row(whole, part, bytes);
    } else {
      copy_row(part, exists ? whole : nullptr, bytes);
    }
  }
  if constexpr (!SCATTER) {
    if (!p.cold) return;
    extern __shared__ u16 list[];  // (N)
    __shared__ u32 marked[MOST_WORDS];
    __shared__ int before_warp[WARPS + 1];
    const int words = (p.N + 31) / 32, left_over = p.N - p.H;
    for (int w = threadIdx.x; w < words; w += THREADS) marked[w] = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < p.H; i += THREADS) {
      const long long n = p.hot[i];
      if (n >= 0 && n < p.N) atomicOr(&marked[n / 32], 1u << n % 32);
    }
    __syncthreads();
    // Each thread has neighbouring words, so that the list is in order.
    const int each = (words + THREADS - 1) / THREADS, from = min((int)threadIdx.x * each, words);
    const int to = min(from + each, words);
    int own = 0;
    for (int w = from; w < to; w++) own += __popc(not_marked(marked, w, p.N));
    int upto = own;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      const int other = __shfl_up_sync(~0u, upto, d);
      if (lane >= d) upto += other;
    }
    if (lane == 31) before_warp[warp + 1] = upto;
    if (threadIdx.x == 0) before_warp[0] = 0;
    __syncthreads();
    int at = upto - own, count = 0;
    for (int i = 1; i <= WARPS; i++) {
      count += before_warp[i];
      if (i <= warp) at += before_warp[i];
    }
    for (int w = from; w < to; w++)
      for (u32 left = not_marked(marked, w, p.N); left; left &= left - 1) list[at++] = (u16)(w * 32 + __ffs(left) - 1);
    __syncthreads();
    const bool right = count == left_over;
    if (blockIdx.x == 0)
      for (int i = threadIdx.x; i < (left_over + PADDING - 1) / PADDING * PADDING; i += THREADS)
        p.neurons[i] = right && i < left_over ? list[i] : 0;
    const char* pattern = p.matrices[0] ? p.matrices[0] : p.matrices[1];
    for (int row = first; row < left_over; row += step)
      copy_row(p.cold + (u64)row * bytes, right ? pattern + (u64)list[row] * bytes : nullptr, bytes);
  }
}
