// TwELL(relu(x_MK @ w_NK^T)): the gate product on tensor cores, packed in the epilogue.            sm_90a, bfloat16
//
//   x: (M, K) bf16, w: (N, K) bf16, both K-contiguous     words: (M, N/T, SLOTS) u32     counts: (M, N/T) i32
//   spilled: (M, N/T, T) bf16, a tile's dense row, written only where it has more than SLOTS non-zeros
//   neurons: (N, rounded up to T) u16, the neurons that the rows of w belong to; null: the row's own number
//
// w may be a part of a gate: its tiles are `first_tile` and those that follow, of `tiles` in a row of the result.
//
// SCREEN: x and w are the rows in int8 of quantise.cu, (M, 2K) and (N, 2K). What is packed is where x w^T may be
// positive, as -0, which relu never gives. gated_down computes these entries.
//
// The loop of product.cuh. The warpgroups that multiply drop their finished tile as bfloat16 into shared memory and go on
// with the next one. Warps 1..3 pack: they read finished tiles there and write TwELL to global memory, so that packing
// overlaps the next tile's products.
// Macros: inference.py's `gate_pack_macros`.
#include "product.cuh"

static_assert(SLOTS >= 1 && SLOTS <= TILE, "a tile cannot have more slots than columns");

constexpr int PACKERS = 3;
constexpr int LANE_VALUES = TILE / 32;
constexpr u32 ROW_BYTES = TILE * 2, HALF_TILE_BYTES = 64 * ROW_BYTES;
constexpr u32 DROP = RING_BYTES, BARS = DROP + 2 * HALF_TILE_BYTES;
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
  const float2 *x_norms, *w_norms;  // SCREEN only: (M) and (N), rounded up to whole tiles
  int M, N, K, tiles, first_tile;
};
#include "params_check.cuh"  // made by compiler.py from params.py: offsets and sizes are those of the Python side

// Two neighbouring values of a row as they are dropped. SCREEN: the product is less than (e_x n_w + n_x e_w) from the sum
// of the products in int8, in units of both scales. A bound that is NaN marks them, too.
__device__ __forceinline__ u32 to_drop(Sum low, Sum high, float2 x, float4 w) {
  if constexpr (!SCREEN) return to_relu_halves(low, high);
  const float most_low = fmaf(x.y, w.x, fmaf(x.x, w.y, low)), most_high = fmaf(x.y, w.z, fmaf(x.x, w.w, high));
  return (most_low <= 0 ? 0 : 0x8000u) | (most_high <= 0 ? 0 : 0x80000000u);
}

// One of the multiplying warpgroups.
__device__ __forceinline__ void multiply_and_drop(const Params& p, Ring ring, u32 dropped, u32 free, int group,
                                                  const Tiles& tiles) {
  const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
  const u32 row = warp * 16 + lane % 16, chunk = lane / 16;
  const u32 buffer = ring.smem + DROP + group * HALF_TILE_BYTES + row * ROW_BYTES;
  u32 parity = 1;
  for (int t = tiles.first; t < tiles.count; t += tiles.stride, parity ^= 1) {
    const Tile tile = tiles.at(t);
    float2 x[2] = {};  // norms of this thread's rows, see product.cuh's `finish`
    if constexpr (SCREEN) {
      const float2* norms = p.x_norms + tile.row + group * 64 + warp * 16 + lane / 4;
      x[0] = norms[0], x[1] = norms[8];
    }
    Sum d[TILE / 2];
    multiply(d, ring, p.K, group, t == tiles.first);
    mbar_wait(free + 8 * group, parity);
    finish(d, ring);
    // 16-byte chunks are swizzled by row.
#pragma unroll
    for (int j = 0; j < TILE / 8; j += 2) {
      float4 w[2] = {};  // norms of two columns each
      if constexpr (SCREEN) {
        const float4* norms = (const float4*)(p.w_norms + tile.column_tile * TILE + 8 * j) + lane % 4;
        w[0] = norms[0], w[1] = norms[4];
      }
      store_matrix_x4(buffer + (((j + chunk) ^ (row & 7)) << 4), to_drop(d[4 * j], d[4 * j + 1], x[0], w[0]),
                      to_drop(d[4 * j + 2], d[4 * j + 3], x[1], w[0]), to_drop(d[4 * j + 4], d[4 * j + 5], x[0], w[1]),
                      to_drop(d[4 * j + 6], d[4 * j + 7], x[1], w[1]));
    }
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

// Bits 2e and 2e + 1 tell whether the low and the high half of pair e are not zero. No half is above 0x8000.
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

__device__ __forceinline__ void pack(const Params& p, u32 smem, u32 dropped, u32 free, const Tiles& tiles) {
  constexpr int BATCH = 4;  // rows at a time, to overlap their latencies
  const int lane = threadIdx.x % 32, packer = threadIdx.x / 32 - 1;
  u32 parity = 0;
  for (int t = tiles.first; t < tiles.count; t += tiles.stride, parity ^= 1) {
    const Tile tile = tiles.at(t);
    const u32 column = tile.column_tile * TILE + lane * LANE_VALUES;
    const uint4 neurons = neurons_at(p, p.first_tile * TILE + column);
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
          const u64 cell = (u64)row * p.tiles + p.first_tile + tile.column_tile;
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
  const Ring ring(smem, smem + BARS);
  const u32 dropped = ring.empty + 8 * STAGES, free = dropped + 16;
  const Tiles tiles(p.M, (p.N + TILE - 1) / TILE);
  const int warp = threadIdx.x / 32, group = warp / 4;
  let_next_kernel_start();
  if (threadIdx.x == 0) {
    ring.init();
    for (int g = 0; g < 2; g++) mbar_init(dropped + 8 * g, 128), mbar_init(free + 8 * g, PACKERS);
    mbar_init_fence();
    if (blockIdx.x == 0) *p.overflow = 0, *p.next_chunk = 0;
  }
  cluster_sync();
  if (group == 0) {
    registers_give<GIVEN>();
    if (threadIdx.x == 0) feed(&p.map_x, &p.map_w, tiles.rank * (TILE / CLUSTER), TILE, p.K, ring, tiles);
    if (warp > 0) pack(p, smem, dropped, free, tiles);
  } else {
    registers_take<TAKEN>();
    multiply_and_drop(p, ring, dropped, free, group - 1, tiles);
  }
  cluster_sync();
}
