// The products of x_MK and w_NK^T on tensor cores, tile by tile: the loop that gate_pack and hot_hidden share.
//
// Rows in int8, two in the place of a 16-bit number, take the same steps, with K the half of theirs.
//
// A CTA computes 128 x TILE outputs; a cluster of two CTAs, one above the other, shares the rows of w by multicast.
//   warp 0          feeds x and w through TMA into a ring of STAGES buffers: `feed`
//   warps 4..11     two warpgroups of 64 rows each: `multiply`, then `finish`, for each tile
// Warpgroup 1 starts two steps behind warpgroup 0, so that one multiplies while the other drops its tile.
#pragma once
#include "ptx.cuh"
#include "wgmma.cuh"  // made by compiler.py for TILE: wgmma, and Sum, the type of its accumulators

static_assert(TILE == 256 || TILE == 128, "wgmma takes a tile of 128 or 256 columns here");

constexpr int ROWS = 128, STEP = 64, CLUSTER = 2, THREADS = 384, SKEW = 2;
// Registers of a thread: the compiler gives all 168 (65,536 over 384 threads); what warpgroup 0 gives away the other two
// take. A kernel that asks for more than there are hangs.
constexpr int GIVEN = 72, TAKEN = 216;
static_assert(GIVEN + 2 * TAKEN <= 3 * 168, "more registers are taken than given");
constexpr u32 X_BYTES = ROWS * STEP * 2, W_BYTES = TILE * STEP * 2, STAGE_BYTES = X_BYTES + W_BYTES;
constexpr u32 RING_BYTES = STAGES * STAGE_BYTES;

struct Tile {
  int row, column_tile;
};

// The tiles of this CTA: t = first, first + stride, ... < count.
struct Tiles {
  int first, count, stride, columns;
  u32 rank;  // of the CTA in its cluster

  __device__ __forceinline__ Tiles(int M, int columns)
      : first(blockIdx.x / CLUSTER),
        count((M + ROWS * CLUSTER - 1) / (ROWS * CLUSTER) * columns),
        stride(gridDim.x / CLUSTER),
        columns(columns),
        rank(cluster_rank()) {}
  // Column tiles run fastest: the clusters at work share a few row blocks of x, and w stays in L2.
  __device__ __forceinline__ Tile at(int t) const { return {(t / columns * CLUSTER + (int)rank) * ROWS, t % columns}; }
};

// The ring of buffers, x (ROWS, STEP) and then w (TILE, STEP), and a thread's place in it. Barriers of each buffer: full,
// its bytes are there; empty, the warpgroups of both CTAs have read it.
struct Ring {
  u32 smem, full, empty, stage = 0, parity = 0, previous = 0;

  __device__ __forceinline__ Ring(u32 smem, u32 bars) : smem(smem), full(bars), empty(bars + 8 * STAGES) {}
  __device__ __forceinline__ void init() const {
    for (int s = 0; s < STAGES; s++) mbar_init(full + 8 * s, 1), mbar_init(empty + 8 * s, 2 * CLUSTER);
  }
  __device__ __forceinline__ void advance() {
    previous = stage;
    if (++stage == STAGES) stage = 0, parity ^= 1;
  }
  __device__ __forceinline__ void wait_full() const { mbar_wait(full + 8 * stage, parity); }
  __device__ __forceinline__ void wait_empty() const { mbar_wait(empty + 8 * stage, parity ^ 1); }
  // The products with the buffer before this one have ended.
  __device__ __forceinline__ void release_previous() const {
    const u32 cta = threadIdx.x % 128;
    if (cta < CLUSTER) mbar_arrive_peer(empty + 8 * previous, cta);
  }
};

// One thread. map_w: boxes of 64 columns x TILE/2 rows; this CTA loads the half of w that begins at row w_row + w_step *
// column tile of it.
__device__ __forceinline__ void feed(const TensorMap* map_x, const TensorMap* map_w, int w_row, int w_step, int K,
                                     Ring ring, const Tiles& tiles) {
  for (int t = tiles.first; t < tiles.count; t += tiles.stride) {
    const Tile tile = tiles.at(t);
#pragma unroll 1
    for (int k = 0; k < K; k += STEP) {
      const u32 bar = ring.full + 8 * ring.stage, x = ring.smem + ring.stage * STAGE_BYTES;
      ring.wait_empty();
      mbar_arrive_expect(bar, STAGE_BYTES);
      tma_load(x, map_x, bar, k, tile.row);
      tma_load_multicast(x + X_BYTES + tiles.rank * (W_BYTES / CLUSTER), map_w, bar, k,
                         w_row + w_step * tile.column_tile, (1 << CLUSTER) - 1);
      ring.advance();
    }
  }
  // A CTA may only leave when its peer has stopped writing to it and reading its barriers.
  for (int s = 0; s < STAGES; s++) ring.wait_empty(), ring.advance();
}

// The products of one tile, of which the last step's still run at the end. first: this is the warpgroup's first tile.
__device__ __forceinline__ void multiply(Sum (&d)[TILE / 2], Ring& ring, int K, int group, bool first) {
  if (first && group == 1 && K > SKEW * STEP) barrier_sync(1, 256);
  const int signal = first && group == 0 ? SKEW * STEP : K;  // the step at which warpgroup 1 may begin; K: none
  // Not unrolled: a step takes hundreds of cycles.
#pragma unroll 1
  for (int k = 0; k < K; k += STEP) {
    const u32 x = ring.smem + ring.stage * STAGE_BYTES;
    ring.wait_full();
    const u64 a = wgmma_operand(x + group * (64 * STEP * 2)), b = wgmma_operand(x + X_BYTES);
    pin_registers(d);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < STEP / 16; i++) wgmma(d, a + 2 * i, b + 2 * i, (k | i) != 0);
    wgmma_commit();
    if (k > 0) {
      wgmma_wait<1>();
      ring.release_previous();
    }
    if (k == signal) barrier_arrive(1, 256);
    ring.advance();
  }
}

// Waits for the last products. A thread holds columns 8j + 2 (lane % 4) + {0, 1} of rows lane / 4 and lane / 4 + 8, in
// d[4j .. 4j + 3].
__device__ __forceinline__ void finish(Sum (&d)[TILE / 2], const Ring& ring) {
  wgmma_wait<0>();
  pin_registers(d);
  ring.release_previous();
}
