// Dense neurons in inference: h = relu(x gate^T) * (x up^T), without a pass over the products.            sm_90a, bfloat16
// SQUARED: relu(x gate^T)^2 * (x up^T). SILU: silu(x gate^T) * (x up^T), a dense rival. Rounded as by dense products and
// hot_forward: g (silu of it is not), u, then h.
//
//   x: (M, K), gate and up: (H, K), all K-contiguous     h: (M, H), H a multiple of 8
//
// The loop of product.cuh: of a tile's 256 columns the first half are gate rows, which the first CTA of the cluster
// loads, and the second half the up rows of the same 128 neurons, which the second one loads. A thread then holds a
// neuron's g and u. Warps 1..3 only give their registers away.
// Macros: hot_steps.py's `hidden_macros`.
#include "product.cuh"

constexpr int COLUMNS = TILE / 2, BOX = 64;                                  // of h, in a tile and in a store
constexpr u32 BOX_BYTES = 64 * BOX * 2, HALF_TILE_BYTES = 64 * COLUMNS * 2;  // of a warpgroup's 64 rows
constexpr u32 DROP = RING_BYTES, BARS = DROP + 2 * HALF_TILE_BYTES;
// The host asks for SMEM_BYTES; 1024 of them are for aligning the swizzled buffers.
static_assert(BARS + 8 * 2 * STAGES + 1024 <= SMEM_BYTES, "the host asks for too little shared memory");

struct Params {
  TensorMap map_x, map_gate, map_up, map_h;  // boxes of 64 columns x 128 rows; of h, 64 x 64
  int M, H, K;
};
#include "params_check.cuh"  // made by compiler.py from params.py: offsets and sizes are those of the Python side

// Of a gate's value, after ReLU but for SILU.
__device__ __forceinline__ float activated(float g) {
  if constexpr (SILU) return __fdividef(g, 1 + __expf(-g));
  return SQUARED ? g * g : g;
}

// h of two neighbouring neurons, from the gate's accumulators i and i + 1.
__device__ __forceinline__ u32 hidden(const float (&d)[TILE / 2], int i) {
  const u32 g = SILU ? to_halves(d[i], d[i + 1]) : to_relu_halves(d[i], d[i + 1]);
  const u32 u = to_halves(d[i + TILE / 4], d[i + TILE / 4 + 1]);
  return to_halves(activated(low_half(g)) * low_half(u), activated(high_half(g)) * high_half(u));
}

// One of the warpgroups that multiply.
__device__ __forceinline__ void multiply_and_store(const Params& p, Ring ring, int group, const Tiles& tiles) {
  const int thread = threadIdx.x % 128, lane = thread % 32;
  const u32 row = thread / 32 * 16 + lane % 16, chunk = lane / 16;
  const u32 buffer = ring.smem + DROP + group * HALF_TILE_BYTES, to = buffer + row * (BOX * 2);
  for (int t = tiles.first; t < tiles.count; t += tiles.stride) {
    const Tile tile = tiles.at(t);
    float d[TILE / 2];
    multiply(d, ring, p.K, group, t == tiles.first);
    if (thread == 0) wait_tma_stores();  // of the tile before, from the same buffer
    barrier_sync(2 + group, 128);
    finish(d, ring);
    // 16-byte chunks are swizzled by row, as TMA expects it.
#pragma unroll
    for (int j = 0; j < COLUMNS / 8; j += 2)
      store_matrix_x4(to + j * 8 / BOX * BOX_BYTES + (((j % 8 + chunk) ^ (row & 7)) << 4), hidden(d, 4 * j),
                      hidden(d, 4 * j + 2), hidden(d, 4 * j + 4), hidden(d, 4 * j + 6));
    fence_tma_store();
    barrier_sync(2 + group, 128);
    if (thread == 0) {
      for (int c = 0; c < COLUMNS; c += BOX)
        tma_store(&p.map_h, buffer + c / BOX * BOX_BYTES, tile.column_tile * COLUMNS + c, tile.row + group * 64);
    }
  }
  if (thread == 0) wait_tma_stores();
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) hot_hidden(const __grid_constant__ Params p) {
  extern __shared__ char raw[];
  const u32 smem = (smem_address(raw) + 1023) & ~1023u;
  const Ring ring(smem, smem + BARS);
  const Tiles tiles(p.M, (p.H + COLUMNS - 1) / COLUMNS);
  const int group = threadIdx.x / 128;
  if (threadIdx.x == 0) ring.init(), mbar_init_fence();
  cluster_sync();
  if (group == 0) {
    registers_give<GIVEN>();
    if (threadIdx.x == 0) feed(&p.map_x, tiles.rank == 0 ? &p.map_gate : &p.map_up, 0, COLUMNS, p.K, ring, tiles);
  } else {
    registers_take<TAKEN>();
    multiply_and_store(p, ring, group - 1, tiles);
  }
  cluster_sync();
}
