// TwELL(relu(x_MK @ w_NK^T)): the gate product on tensor cores, packed in the epilogue.            sm_90a, bfloat16
//
//   x: (M, K) bf16, w: (N, K) bf16, both K-contiguous     words: (M, N/T, SLOTS) u32     counts: (M, N/T) i32
//   spilled: (M, N/T, T) bf16, a tile's dense row, written only where it has more than SLOTS non-zeros
//   neurons: (N, rounded up to T) u16, the neurons that the rows of w belong to; null: the row's own number
//
// A CTA computes 128 x T outputs; a cluster of two CTAs, one above the other, shares the columns of w by multicast.
//   warp 0          feeds x and w through TMA into a ring of STAGES buffers
//   warps 1..3      pack: they read finished tiles from shared memory and write TwELL to global memory
//   warps 4..11     two warpgroups of 64 rows each; they multiply, drop the tile as bfloat16 into shared memory and go
//                   on with the next one, so that packing overlaps the next tile's products
// Warpgroup 1 starts two steps behind warpgroup 0, so that one multiplies while the other drops its tile.
// Macros: inference.py's `Tiling`, by `gate_pack_kernel`.
#include "ptx.cuh"
#include "wgmma.cuh"  // made by compiler.py for TILE

static_assert(TILE == 256 || TILE == 128, "wgmma takes a tile of 128 or 256 columns here");
static_assert(SLOTS >= 1 && SLOTS <= TILE, "a tile cannot have more slots than columns");

constexpr int ROWS = 128, STEP = 64, CLUSTER = 2, THREADS = 384, PACKERS = 3, SKEW = 2;
// Registers of a thread: the compiler gives all 168 (65,536 over 384 threads); what warpgroup 0 gives away the other two
// take. A kernel that asks for more than there are hangs.
constexpr int GIVEN = 72, TAKEN = 216;
static_assert(GIVEN + 2 * TAKEN <= 3 * 168, "more registers are taken than given");
constexpr int LANE_VALUES = TILE / 32;
constexpr u32 X_BYTES = ROWS * STEP * 2, W_BYTES = TILE * STEP * 2, STAGE_BYTES = X_BYTES + W_BYTES;
constexpr u32 ROW_BYTES = TILE * 2, HALF_TILE_BYTES = 64 * ROW_BYTES;
constexpr u32 DROP = STAGES * STAGE_BYTES, BARS = DROP + 2 * HALF_TILE_BYTES;
// The host asks for SMEM_BYTES; 1024 of them are for aligning the swizzled buffers.
static_assert(BARS + 8 * (2 * STAGES + 4) + 1024 <= SMEM_BYTES, "the host asks for too little shared memory");

struct Params {
  TensorMap map_x, map_w;  // boxes of 64 columns x 128 rows, and 64 x TILE/2
  u32* words;
  int* counts;
  u32* spilled;
  u64* overflow;  // both zeroed here for the kernel that follows
  u32* next_chunk;
  const u16* neurons;
  int M, N, K;
};
#include "params_check.cuh"  // made by compiler.py from params.py: offsets and sizes are those of the Python side

struct Tile {
  int row, column_tile;
};

// Column tiles run fastest: the clusters at work share a few row blocks of x, and w stays in L2.
__device__ __forceinline__ Tile tile_at(int index, int column_tiles, u32 rank) {
  return {(index / column_tiles * CLUSTER + (int)rank) * ROWS, index % column_tiles};
}

__device__ __forceinline__ void feed(const Params& p, u32 smem, u32 full, u32 empty, u32 rank, int first, int tiles,
                                     int stride, int column_tiles) {
  u32 stage = 0, parity = 1;
  for (int t = first; t < tiles; t += stride) {
    const Tile tile = tile_at(t, column_tiles, rank);
    for (int k = 0; k < p.K; k += STEP) {
      const u32 bar = full + 8 * stage, x = smem + stage * STAGE_BYTES, w = x + X_BYTES + rank * (W_BYTES / CLUSTER);
      mbar_wait(empty + 8 * stage, parity);
      mbar_arrive_expect(bar, STAGE_BYTES);
      tma_load(x, &p.map_x, bar, k, tile.row);
      tma_load_multicast(w, &p.map_w, bar, k, tile.column_tile * TILE + rank * (TILE / CLUSTER), (1 << CLUSTER) - 1);
      if (++stage == STAGES) stage = 0, parity ^= 1;
    }
  }
  // A CTA may only leave when its peer has stopped writing to it and reading its barriers.
  for (int s = 0; s < STAGES; s++) {
    mbar_wait(empty + 8 * stage, parity);
    if (++stage == STAGES) stage = 0, parity ^= 1;
  }
}

__device__ __forceinline__ void multiply(const Params& p, u32 smem, u32 full, u32 empty, u32 dropped, u32 free,
                                         int group, int first, int tiles, int stride) {
  const int thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
  const u32 row = warp * 16 + lane % 16, buffer = smem + DROP + group * HALF_TILE_BYTES + row * ROW_BYTES,
            chunk = lane / 16;
  u32 stage = 0, parity = 0, free_parity = 1;
  if (group == 1 && first < tiles && p.K > SKEW * STEP) barrier_sync(1, 256);
  for (int t = first; t < tiles; t += stride, free_parity ^= 1) {
    float d[TILE / 2];
    u32 previous = 0;
    for (int k = 0; k < p.K; k += STEP) {
      const u32 x = smem + stage * STAGE_BYTES;
      mbar_wait(full + 8 * stage, parity);
      const u64 a = wgmma_operand(x + group * (64 * STEP * 2)), b = wgmma_operand(x + X_BYTES);
      pin_registers(d);
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < STEP / 16; i++) wgmma(d, a + 2 * i, b + 2 * i, (k | i) != 0);
      wgmma_commit();
      if (k > 0) {
        wgmma_wait<1>();
        if (thread < CLUSTER) mbar_arrive_peer(empty + 8 * previous, thread);
      }
      if (group == 0 && t == first && k == SKEW * STEP) barrier_arrive(1, 256);
      previous = stage;
      if (++stage == STAGES) stage = 0, parity ^= 1;
    }
    mbar_wait(free + 8 * group, free_parity);
    wgmma_wait<0>();
    pin_registers(d);
    if (thread < CLUSTER) mbar_arrive_peer(empty + 8 * previous, thread);
    // A thread holds columns 8j + 2 (lane % 4) + {0, 1} of rows lane / 4 and lane / 4 + 8; 16-byte chunks are swizzled by row.
#pragma unroll
    for (int j = 0; j < TILE / 8; j += 2)
      store_matrix_x4(buffer + (((j + chunk) ^ (row & 7)) << 4), to_relu_halves(d[4 * j], d[4 * j + 1]),
                      to_relu_halves(d[4 * j + 2], d[4 * j + 3]), to_relu_halves(d[4 * j + 4], d[4 * j + 5]),
                      to_relu_halves(d[4 * j + 6], d[4 * j + 7]));
    mbar_arrive(dropped + 8 * group);
  }
}

// A lane's LANE_VALUES consecutive values of one row of the tile, as pairs; with 4 values z and w stay zero. Named
// members, because an array that is indexed at run time would be in local memory.
__device__ __forceinline__ uint4 read_row(u32 buffer, int row, int lane) {
  if constexpr (LANE_VALUES == 8) return load_shared(buffer + row * ROW_BYTES + ((lane ^ (row & 7)) << 4));
  const uint2 v = load_shared_8(buffer + row * ROW_BYTES + (((lane / 2) ^ (row & 7)) << 4) + (lane & 1) * 8);
  return make_uint4(v.x, v.y, 0, 0);
}

// Bits 2e and 2e + 1 tell whether the low and the high half of pair e are not zero. Halves are >= 0 (ReLU).
__device__ __forceinline__ u32 nonzero_mask(uint4 v) {
  const u32 x = (v.x + 0x7fff7fffu) & 0x80008000u, y = (v.y + 0x7fff7fffu) & 0x80008000u;
  const u32 z = (v.z + 0x7fff7fffu) & 0x80008000u, w = (v.w + 0x7fff7fffu) & 0x80008000u;
  const u32 all = (x >> 15) | (y >> 13) | (z >> 11) | (w >> 9);  // even values in bits 0, 2, 4, 6; odd ones 16 higher
  return (all | (all >> 15)) & 0xff;
}

__device__ __forceinline__ u32 value_bits(uint4 v, int index) {  // in the upper half of the word
  const u32 pair = index < 4 ? (index < 2 ? v.x : v.y) : (index < 6 ? v.z : v.w);
  return index & 1 ? pair & 0xffff0000u : pair << 16;
}

// The neurons of a lane's columns, two in a word.
__device__ __forceinline__ uint4 neurons_at(const Params& p, u32 column) {
  if (!p.neurons) {
    const u32 two = column | (column + 1) << 16;
    return make_uint4(two, two + 0x20002, two + 0x40004, two + 0x60006);
  }
  if constexpr (LANE_VALUES == 8) return load_once(p.neurons + column);
  const uint2 four = *(const uint2*)(p.neurons + column);
  return make_uint4(four.x, four.y, 0, 0);
}

__device__ __forceinline__ void pack(const Params& p, u32 smem, u32 dropped, u32 free, u32 rank, int first, int tiles,
                                     int stride, int column_tiles) {
  constexpr int BATCH = 4;  // rows at a time, to overlap their latencies
  const int lane = threadIdx.x % 32, packer = threadIdx.x / 32 - 1;
  u32 parity = 0;
  for (int t = first; t < tiles; t += stride, parity ^= 1) {
    const Tile tile = tile_at(t, column_tiles, rank);
    const u32 column = tile.column_tile * TILE + lane * LANE_VALUES;
    const uint4 neurons = neurons_at(p, column);
    // A column past the end is a product with zeros, which is NaN where x is not finite: it is not a neuron.
    const u32 inside = (1u << min(max(p.N - (int)column, 0), LANE_VALUES)) - 1;
    for (int group = 0; group < 2; group++) {
      mbar_wait(dropped + 8 * group, parity);
      const u32 buffer = smem + DROP + group * HALF_TILE_BYTES;
      for (int r = packer * BATCH; r < 64; r += PACKERS * BATCH) {
        uint4 v[BATCH];
        u32 mask[BATCH], before[BATCH / 2], own[BATCH / 2];  // two rows' counts share a word
#pragma unroll
        for (int i = 0; i < BATCH; i++) v[i] = read_row(buffer, r + i, lane);
#pragma unroll
        for (int i = 0; i < BATCH; i++) mask[i] = nonzero_mask(v[i]) & inside;
#pragma unroll
        for (int i = 0; i < BATCH / 2; i++) before[i] = own[i] = __popc(mask[2 * i]) | (__popc(mask[2 * i + 1]) << 16);
#pragma unroll
        for (int d = 1; d < 32; d *= 2) {
#pragma unroll
          for (int i = 0; i < BATCH / 2; i++) {
            const u32 other = __shfl_up_sync(~0u, before[i], d);
            if (lane >= d) before[i] += other;
          }
        }
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
          const int row = tile.row + group * 64 + r + i;
          if (row >= p.M) break;
          const u32 sum = before[i / 2] >> (16 * (i & 1)) & 0xffff, count = __shfl_sync(~0u, sum, 31);
          const u64 cell = (u64)row * column_tiles + tile.column_tile;
          u32* slot = p.words + cell * SLOTS;
          if (lane == 0) p.counts[cell] = count;
          if (count > SLOTS) {
            u32* to = p.spilled + cell * (TILE / 2) + lane * (LANE_VALUES / 2);
            if constexpr (LANE_VALUES == 8)
              *(uint4*)to = v[i];
            else
              *(uint2*)to = make_uint2(v[i].x, v[i].y);
            continue;
          }
          slot += sum - (own[i / 2] >> (16 * (i & 1)) & 0xffff);
          for (u32 left = mask[i]; left; left &= left - 1) {
            const int index = __ffs(left) - 1;
            *slot++ = value_bits(v[i], index) | (value_bits(neurons, index) >> 16);
          }
        }
      }
      __syncwarp();
      if (lane == 0) mbar_arrive(free + 8 * group);
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) gate_pack(const __grid_constant__ Params p) {
  extern __shared__ char raw[];
  const u32 smem = (smem_address(raw) + 1023) & ~1023u;
  const u32 full = smem + BARS, empty = full + 8 * STAGES, dropped = empty + 8 * STAGES, free = dropped + 16;
  const u32 rank = cluster_rank();
  const int column_tiles = (p.N + TILE - 1) / TILE,
            tiles = (p.M + ROWS * CLUSTER - 1) / (ROWS * CLUSTER) * column_tiles;
  const int first = blockIdx.x / CLUSTER, stride = gridDim.x / CLUSTER, warp = threadIdx.x / 32, group = warp / 4;
  let_next_kernel_start();
  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; s++) mbar_init(full + 8 * s, 1), mbar_init(empty + 8 * s, 2 * CLUSTER);
    for (int g = 0; g < 2; g++) mbar_init(dropped + 8 * g, 128), mbar_init(free + 8 * g, PACKERS);
    mbar_init_fence();
    if (blockIdx.x == 0) *p.overflow = 0, *p.next_chunk = 0;
  }
  cluster_sync();
  if (group == 0) {
    registers_give<GIVEN>();
    if (threadIdx.x == 0) feed(p, smem, full, empty, rank, first, tiles, stride, column_tiles);
    if (warp > 0) pack(p, smem, dropped, free, rank, first, tiles, stride, column_tiles);
  } else {
    registers_take<TAKEN>();
    multiply(p, smem, full, empty, dropped, free, group - 1, first, tiles, stride);
  }
  cluster_sync();
}
