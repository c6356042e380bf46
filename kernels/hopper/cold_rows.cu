// The rows of w that are not hot, side by side, and which neurons they are.                            sm_90a, bfloat16
//
//   hot: (H) int64, distinct     w: (N, K), K-contiguous     rows: (N - H, K)     neurons: (N - H, rounded up to 256) u16
//
// Every thread block makes the list for itself, which takes less time than to wait for another; then each copies its
// share. Where a neuron occurs twice in hot, or none of that number exists, all rows become NaN: nothing is lost unseen.
#include "ptx.cuh"

constexpr int THREADS = WARPS * 32, PADDING = 256, MOST_WORDS = 65536 / 32;

struct Params {
  const long long* hot;
  const char* w;
  char* rows;
  u16* neurons;
  long long stride;  // of w, bytes
  int H, N, K;
};
#include "params_check.cuh"  // made by compiler.py from params.py: offsets and sizes are those of the Python side

extern "C" __global__ void __launch_bounds__(THREADS) cold_rows(const __grid_constant__ Params p) {
  extern __shared__ u16 list[];  // (N)
  __shared__ u32 marked[MOST_WORDS];
  __shared__ int before_warp[WARPS + 1];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, words = (p.N + 31) / 32;
  for (int w = threadIdx.x; w < words; w += THREADS) marked[w] = 0;
  __syncthreads();
  for (int i = threadIdx.x; i < p.H; i += THREADS) {
    const long long n = p.hot[i];
    if (n >= 0 && n < p.N) atomicOr(&marked[n / 32], 1u << n % 32);
  }
  __syncthreads();
  // Each thread has neighbouring words, so that the list is in order.
  const int each = (words + THREADS - 1) / THREADS, from = min((int)threadIdx.x * each, words),
            to = min(from + each, words);
  int own = 0;
  for (int w = from; w < to; w++) own += __popc(~marked[w] & (w * 32 + 32 <= p.N ? ~0u : (1u << p.N % 32) - 1));
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
    for (u32 left = ~marked[w] & (w * 32 + 32 <= p.N ? ~0u : (1u << p.N % 32) - 1); left; left &= left - 1)
      list[at++] = (u16)(w * 32 + __ffs(left) - 1);
  __syncthreads();
  const int cold = p.N - p.H;
  const bool right = count == cold;
  if (blockIdx.x == 0)
    for (int i = threadIdx.x; i < (cold + PADDING - 1) / PADDING * PADDING; i += THREADS)
      p.neurons[i] = right && i < cold ? list[i] : 0;
  for (int row = blockIdx.x * WARPS + warp; row < cold; row += gridDim.x * WARPS) {
    const char* source = p.w + (right ? list[row] : 0) * p.stride;
    for (int k = lane * 16; k < p.K * 2; k += 512)
      store_once(p.rows + (u64)row * (p.K * 2) + k,
                 right ? load_once(source + k) : make_uint4(0x7fff7fff, 0x7fff7fff, 0x7fff7fff, 0x7fff7fff));
  }
}
