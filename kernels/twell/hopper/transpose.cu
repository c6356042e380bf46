// The index of each entry among the records, which are ordered by neuron, then by token.                 sm_90a
//
//   saved_words, saved_rows: as gated_down.cu leaves them
//   record_index: of each entry, at the index of its word in saved_words
//   ends: (N) the number of entries of this neuron and all before it
//
// Three launches: STEP 0 counts the entries of each neuron in each block of 64 tokens, STEP 1 adds the counts up over blocks
// and neurons, STEP 2 gives out the indices. Within a block the tokens of a neuron are bits of a mask, so the order never
// depends on timing.
// Macros: backward.py's `TRANSPOSE_MACROS`.
#include "ptx.cuh"

constexpr int BLOCK = 64, THREADS = 512, WARPS = THREADS / 32;

struct Params {
  const u32* saved_words;
  const int* saved_rows;  // (2, M)
  u8* counts;             // (blocks, N): from step 0 to step 1
  u32* before;            // (blocks, N): the neuron's entries in blocks before; from step 1 to step 2
  u32* ends;              // (N)
  u32* record_index;
  u32* frequent;  // (N): neurons with more than FREQUENT entries
  u32* counters;  // zeroed by step 0: how many are frequent, and those of the kernels that follow; 8 in all
  int M, N;
};
#include "params_check.cuh"  // made by compiler.py from params.py: offsets and sizes are those of the Python side

// Calls use(neuron, token of the block, index) for every entry of the block whose neuron is in [first, first + RANGE).
template <class Use>
__device__ __forceinline__ void for_entries(const Params& p, int block, int first, Use use) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int t = warp; t < BLOCK && block * BLOCK + t < p.M; t += WARPS) {
    const int row = block * BLOCK + t, start = p.saved_rows[row], count = start < 0 ? 0 : p.saved_rows[p.M + row];
    for (int i = lane; i < count; i += 32) {
      const int neuron = (int)(p.saved_words[(u32)start + i] & 0xffff) - first;
      if (neuron >= 0 && neuron < RANGE) use(neuron, t, (u32)start + i);
    }
  }
}

__device__ __forceinline__ void mark(const Params& p, int block, int first, u32* mask) {
  for (int i = threadIdx.x; i < 2 * RANGE; i += THREADS) mask[i] = 0;
  __syncthreads();
  for_entries(p, block, first,
              [&](int neuron, int t, u32) { atomicOr(&mask[t / 32 * RANGE + neuron], 1u << (t % 32)); });
  __syncthreads();
}

extern "C" __global__ void __launch_bounds__(THREADS) transpose(const __grid_constant__ Params p) {
  extern __shared__ u32 mask[];  // two words of 32 tokens for each neuron of the range
#if STEP == 1
  __shared__ u32 sums[WARPS];
  __shared__ bool last;
  const int blocks = (p.M + BLOCK - 1) / BLOCK, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int n = blockIdx.x * THREADS + threadIdx.x;
  if (n < p.N) {
    u32 sum = 0;
#pragma unroll 16
    for (int b = 0; b < blocks; b++) {
      const u32 count = p.counts[(u64)b * p.N + n];
      p.before[(u64)b * p.N + n] = sum;
      sum += count;
    }
    p.ends[n] = sum;
    if (sum > FREQUENT) p.frequent[atomicAdd(&p.counters[0], 1)] = n;
  }
  // The last CTA to arrive adds up over the neurons.
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) last = atomicAdd(&p.counters[1], 1) == gridDim.x - 1;
  __syncthreads();
  if (!last) return;
  __threadfence();
  u32 carried = 0;
  for (int first = 0; first < p.N; first += THREADS) {
    const int i = first + threadIdx.x;
    u32 sum = i < p.N ? *(volatile u32*)(p.ends + i) : 0;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      const u32 other = __shfl_up_sync(~0u, sum, d);
      if (lane >= d) sum += other;
    }
    if (lane == 31) sums[warp] = sum;
    __syncthreads();
    u32 all = 0;
    for (int w = 0; w < WARPS; w++) {
      if (w == warp) sum += all + carried;
      all += sums[w];
    }
    carried += all;
    if (i < p.N) p.ends[i] = sum;
    __syncthreads();
  }
#else
  if (STEP == 0 && blockIdx.x == 0 && threadIdx.x < 8) p.counters[threadIdx.x] = 0;
  const u64 row = (u64)blockIdx.x * p.N;
  for (int first = 0; first < p.N; first += RANGE) {
    mark(p, blockIdx.x, first, mask);
    if (STEP == 0) {
      for (int i = threadIdx.x; i < RANGE && first + i < p.N; i += THREADS)
        p.counts[row + first + i] = __popc(mask[i]) + __popc(mask[RANGE + i]);
    } else {
      for_entries(p, blockIdx.x, first, [&](int neuron, int t, u32 index) {
        const int n = first + neuron;
        const u32 low = mask[neuron], high = mask[RANGE + neuron], below = (1u << (t % 32)) - 1;
        const u32 rank = t < 32 ? __popc(low & below) : __popc(low) + __popc(high & below);
        p.record_index[index] = (n ? p.ends[n - 1] : 0) + p.before[row + n] + rank;
      });
    }
    __syncthreads();
  }
#endif
}
