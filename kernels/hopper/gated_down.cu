// y = (g * (x @ up^T)) @ down on the pattern of g, one pass: u and h never reach memory.           sm_90a, bfloat16
// Without a gate (GATED = 0): y = g @ down.
//
//   words, counts, spilled: g as gate_pack.cu leaves it     x, y: (M, K) bf16     up, down: (N, K) bf16
//
// For each non-zero a warp reads one row of up (a dot product with x) and one of down (added to y); both come from L2,
// or from L1 when a token at work on the same SM used them just before: that is why neighbouring tokens run together.
// A token's hidden size is cut into SLICES of at most 2048, one warp each; its non-zeros are dealt to PARTS such teams.
// With one part, tokens over HEAVY non-zeros wait until the CTA's other tokens are done; then all of its warps share them.
#include "ptx.cuh"

constexpr int WARPS = 12, LIST = 256, HEAVY = 192;
constexpr int SLICES = (K + 2047) / 2048, CHUNKS = (K + 256 * SLICES - 1) / (256 * SLICES), TEAMS = WARPS / SLICES;
constexpr int ROW_BYTES = K * 2;
static_assert(K % 64 == 0 && K <= 8192, "the hidden size must be a multiple of 64 up to 8192");
static_assert(WARPS % (SLICES * PARTS) == 0, "a CTA must hold a whole number of tokens");
static_assert(TILE <= LIST, "a spilled tile must fit into one list");

struct Params {
  const char *x, *up, *down;
  const u32* words;
  const int* counts;
  const u16* spilled;
  char* y;
  u64* overflow;   // zero at the start: tiles with more non-zeros than slots
  int* nonzeros;   // (M), STATS only
  float* l1;       // (M), STATS only
  u8* fired;       // (N), STATS only, zero at the start
  int* link;       // (M): lists of heavy tokens
  u32* next_chunk; // zero at the start
  const u8* suspect;    // (N): neurons whose up or down weights are not all finite
  const u32* suspects;  // (suspect_counts): numbers that add up to how many these are
  long long x_stride;  // bytes
  int M, N, chunk, suspect_counts;
};

// How far a token's entries have been listed: the next 32 tiles and the place among their entries, which of the 32
// before overflowed and are still to do, the next neurons to look at for weights that are not finite.
struct Cursor {
  int tile, window, suspect;
  u32 spilled;
};

struct Shared {
  static constexpr int SUMS = PARTS == 1 ? 1 : TEAMS / PARTS;
  u32 list[WARPS][LIST];
  Cursor cursor[WARPS];
  float dot[2][WARPS];
  alignas(16) float sum[SUMS][SLICES * CHUNKS * 256];  // y of a token, and its l1, on its way from part to part
  float sum_l1[SUMS];
  int token[2][WARPS];
  int next, heavy, suspicious;
  volatile int chunk_base[4], chunk_tag[4];
};
static_assert(sizeof(Shared) <= 48 * 1024, "static shared memory ends at 48 KB; use more parts");

// Where a warp stands: which slice of the hidden size, which part of the non-zeros, which of the tokens at work.
template <int P>
struct Place {
  int lane, warp, slice, part, unit;
  __device__ Place() : lane(threadIdx.x % 32), warp(threadIdx.x / 32), slice(warp % SLICES), part(warp / SLICES % P), unit(warp / (SLICES * P)) {}
  __device__ bool leads() const { return part == 0 && slice == 0 && lane == 0; }
  __device__ void sync_token() const {
    if constexpr (SLICES * P > 1) barrier_sync(1 + unit, SLICES * P * 32);
    else __syncwarp();
  }
  __device__ void sync_slices() const { barrier_sync(1 + WARPS / SLICES / P + unit * P + part, SLICES * 32); }
};

__device__ __forceinline__ int element(int slice, int chunk, int lane) { return (slice * CHUNKS + chunk) * 256 + lane * 8; }
// Only the last chunk of a row can reach past its end; for the others this is decided at compile time.
__device__ __forceinline__ bool inside(int slice, int chunk, int lane) { return K % (256 * SLICES) == 0 || element(slice, chunk, lane) < K; }

__device__ __forceinline__ void load_row(uint4 (&v)[CHUNKS], const char* row, int slice, int lane) {
#pragma unroll
  for (int j = 0; j < CHUNKS; j++) v[j] = inside(slice, j, lane) ? load_weights(row + element(slice, j, lane) * 2) : make_uint4(0, 0, 0, 0);
}

__device__ __forceinline__ float dot(const uint4 (&a)[CHUNKS], const uint4 (&b)[CHUNKS]) {
  float low = 0, high = 0;
#pragma unroll
  for (int j = 0; j < CHUNKS; j++) {
    low = fmaf(low_half(a[j].x), low_half(b[j].x), low), high = fmaf(high_half(a[j].x), high_half(b[j].x), high);
    low = fmaf(low_half(a[j].y), low_half(b[j].y), low), high = fmaf(high_half(a[j].y), high_half(b[j].y), high);
    low = fmaf(low_half(a[j].z), low_half(b[j].z), low), high = fmaf(high_half(a[j].z), high_half(b[j].z), high);
    low = fmaf(low_half(a[j].w), low_half(b[j].w), low), high = fmaf(high_half(a[j].w), high_half(b[j].w), high);
  }
  return low + high;
}

__device__ __forceinline__ void add_scaled(float (&y)[CHUNKS * 8], float h, const uint4 (&v)[CHUNKS]) {
#pragma unroll
  for (int j = 0; j < CHUNKS; j++) {
    float* to = y + 8 * j;
    to[0] = fmaf(h, low_half(v[j].x), to[0]), to[1] = fmaf(h, high_half(v[j].x), to[1]);
    to[2] = fmaf(h, low_half(v[j].y), to[2]), to[3] = fmaf(h, high_half(v[j].y), to[3]);
    to[4] = fmaf(h, low_half(v[j].z), to[4]), to[5] = fmaf(h, high_half(v[j].z), to[5]);
    to[6] = fmaf(h, low_half(v[j].w), to[6]), to[7] = fmaf(h, high_half(v[j].w), to[7]);
  }
}

// The sum over the warp and, for a row in several slices, over their warps.
template <int P>
__device__ __forceinline__ float total(float s, const Place<P>& at, Shared& sm, int& flip) {
#pragma unroll
  for (int d = 16; d; d /= 2) s += __shfl_xor_sync(~0u, s, d);
  if constexpr (SLICES > 1) {
    if (at.lane == 0) sm.dot[flip][at.warp] = s;
    at.sync_slices();
    s = 0;
#pragma unroll
    for (int i = 0; i < SLICES; i++) s += sm.dot[flip][at.warp - at.slice + i];
    flip ^= 1;
  }
  return s;
}

__device__ __forceinline__ bool not_finite(const uint4 (&v)[CHUNKS]) {
  u32 seen = 0;
#pragma unroll
  for (int j = 0; j < CHUNKS; j++) seen |= exponent_is_full(v[j]);
  return seen;
}

__device__ __forceinline__ int count_of(const Params& p, int row, int tile) {
  const int tiles = (p.N + TILE - 1) / TILE;
  return tile < tiles ? p.counts[(u64)row * tiles + tile] : 0;
}

// One token: what a warp keeps in registers, and the steps on it.
template <int P>
struct Token {
  const Params& p;
  Shared& sm;
  Place<P> at;
  int row, flip;
  uint4 x[CHUNKS];
  float y[CHUNKS * 8];
  float l1;

  __device__ Token(const Params& p, Shared& sm) : p(p), sm(sm), flip(0) {}

  __device__ void use(u32 word) {
    const u64 offset = (u64)(word & 0xffff) * ROW_BYTES;
    uint4 u[CHUNKS], d[CHUNKS];
    if constexpr (GATED) load_row(u, p.up + offset, at.slice, at.lane);
    load_row(d, p.down + offset, at.slice, at.lane);
    float h = high_half(word);
    if constexpr (GATED) h *= total(dot(u, x), at, sm, flip);
    if constexpr (STATS) l1 += fabsf(h);
    add_scaled(y, h, d);
  }

  __device__ void use_list(int entries) {
    __syncwarp();
    for (int i = at.part; i < entries; i += P) use(sm.list[at.warp][i]);
    __syncwarp();
  }

  __device__ void append(int slot, u32 word) {
    sm.list[at.warp][slot] = word;
    if constexpr (STATS) {
      u8* fired = p.fired + (word & 0xffff);
      if (!*(volatile u8*)fired) *fired = 1;
    }
  }

  // Fills this warp's list with the token's next entries; false when these were the last. A token is walked 32 tiles at
  // a time, then those of them that overflowed one by one, in the end the neurons with weights that are not finite.
  // (One walk, so that the code that uses the entries stands only once: it needs nearly all registers.)
  __device__ bool fill_list(int& entries) {
    Cursor c = sm.cursor[at.warp];
    const int tiles = (p.N + TILE - 1) / TILE;
    __syncwarp();
    if (c.spilled) {
      entries = list_spilled(c.tile - 32 + __ffs(c.spilled) - 1);
      c.spilled &= c.spilled - 1;
    } else if (c.tile < tiles) {
      const int count = count_of(p, row, c.tile + at.lane), all = list_tiles(c, count <= SLOTS ? count : 0);
      entries = min(LIST, all - c.window);
      c.window += LIST;
      if (c.window >= all) {
        c.spilled = __ballot_sync(~0u, count > SLOTS);
        if (c.spilled && at.leads()) atomicAdd(p.overflow, __popc(c.spilled));
        c.tile += 32, c.window = 0;
      }
    } else {
      entries = list_suspects(c.suspect);
      c.suspect += 32;
    }
    if (at.lane == 0) sm.cursor[at.warp] = c;
    return c.spilled || c.tile < tiles || (sm.suspicious && c.suspect < p.N);
  }

  // A window of the entries of 32 tiles, `entries` of them in this lane's; returns how many there are in all.
  __device__ int list_tiles(const Cursor& c, int entries) {
    int end = entries;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      const int before = __shfl_up_sync(~0u, end, d);
      if (at.lane >= d) end += before;
    }
    const int begin = end - entries, last = min(end, c.window + LIST);
    const u32* from = p.words + ((u64)row * ((p.N + TILE - 1) / TILE) + c.tile + at.lane) * SLOTS - begin;
    for (int i = max(begin, c.window); i < last; i++) append(i - c.window, from[i]);
    return __shfl_sync(~0u, end, 31);
  }

  // A tile that overflowed: its dense row was kept.
  __device__ int list_spilled(int tile) {
    const u16* from = p.spilled + ((u64)row * ((p.N + TILE - 1) / TILE) + tile) * TILE;
    int entries = 0;
    for (int c = 0; c < TILE; c += 32) {
      const u32 bits = from[c + at.lane], active = __ballot_sync(~0u, bits != 0);
      if (bits) append(entries + __popc(active & ((1u << at.lane) - 1)), bits << 16 | (tile * TILE + c + at.lane));
      entries += __popc(active);
    }
    return entries;
  }

  // 0 * Inf is NaN: neurons that the pattern leaves out count all the same where their weights are not finite.
  __device__ int list_suspects(int first) {
    const int mine = first + at.lane;
    bool missing = mine < p.N && p.suspect[mine];
    if (missing) {
      const u64 cell = (u64)row * ((p.N + TILE - 1) / TILE) + mine / TILE;
      const int count = p.counts[cell];
      if (count > SLOTS) missing = p.spilled[cell * TILE + mine % TILE] == 0;
      else
        for (int i = 0; i < count; i++) missing &= (p.words[cell * SLOTS + i] & 0xffff) != mine;
    }
    const u32 all = __ballot_sync(~0u, missing);
    if (missing) sm.list[at.warp][__popc(all & ((1u << at.lane) - 1))] = mine;
    return __popc(all);
  }

  // 0 * Inf is NaN: an input that is not finite spoils every neuron that the pattern leaves out.
  __device__ void poison() {
#pragma unroll
    for (int i = 0; i < CHUNKS * 8; i++) y[i] = __uint_as_float(0x7fffffff);
    l1 = __uint_as_float(0x7fffffff);
  }

  __device__ void run(int token, int nonzeros) {
    row = token, l1 = 0;
    bool bad = false;
    if constexpr (GATED) {
#pragma unroll
      for (int j = 0; j < CHUNKS; j++)
        x[j] = inside(at.slice, j, at.lane) ? load_once(p.x + row * p.x_stride + element(at.slice, j, at.lane) * 2) : make_uint4(0, 0, 0, 0);
      bad = total(not_finite(x) ? 1.f : 0.f, at, sm, flip) != 0 && nonzeros < p.N;
    }
#pragma unroll
    for (int i = 0; i < CHUNKS * 8; i++) y[i] = 0;
    if (at.lane == 0) sm.cursor[at.warp] = Cursor{0, 0, 0, 0};
    __syncwarp();
    bool more = true;
    while (more) {
      int entries;
      more = fill_list(entries);
      use_list(entries);
    }
    if (bad) poison();
    finish(nonzeros);
  }

  // Adds up the parts in their order, so that the result does not depend on timing; the last one writes.
  __device__ void finish(int nonzeros) {
    if constexpr (P > 1) {
      float4* sum = (float4*)sm.sum[at.unit] + (at.slice * CHUNKS * 2) * 32 + at.lane;
      for (int turn = 0; turn < P; turn++) {
        if (at.part == turn) {
#pragma unroll
          for (int i = 0; i < CHUNKS * 2; i++) {
            float4 v = make_float4(y[4 * i], y[4 * i + 1], y[4 * i + 2], y[4 * i + 3]);
            if (turn > 0) {
              const float4 before = sum[32 * i];
              v = make_float4(v.x + before.x, v.y + before.y, v.z + before.z, v.w + before.w);
            }
            if (turn < P - 1) sum[32 * i] = v;
            y[4 * i] = v.x, y[4 * i + 1] = v.y, y[4 * i + 2] = v.z, y[4 * i + 3] = v.w;
          }
          if (STATS && at.slice == 0 && at.lane == 0) sm.sum_l1[at.unit] = l1 = turn > 0 ? l1 + sm.sum_l1[at.unit] : l1;
        }
        at.sync_token();
      }
    }
    if (at.part != P - 1) return;
#pragma unroll
    for (int j = 0; j < CHUNKS; j++) {
      const float* v = y + 8 * j;
      const uint4 out = make_uint4(to_halves(v[0], v[1]), to_halves(v[2], v[3]), to_halves(v[4], v[5]), to_halves(v[6], v[7]));
      if (inside(at.slice, j, at.lane)) store_once(p.y + (u64)row * ROW_BYTES + element(at.slice, j, at.lane) * 2, out);
    }
    if (STATS && at.slice == 0 && at.lane == 0) p.nonzeros[row] = nonzeros, p.l1[row] = l1;
  }
};

// The next token of this unit. A CTA takes `chunk` neighbouring tokens at a time, its units one by one from these.
template <int P>
__device__ __forceinline__ int next_token(const Params& p, Shared& sm, const Place<P>& at, int& turn) {
  int token = 0;
  if (at.leads()) {
    const int ticket = atomicAdd(&sm.next, 1), chunk = ticket / p.chunk, slot = chunk % 4;
    if (ticket % p.chunk == 0) {
      sm.chunk_base[slot] = atomicAdd(p.next_chunk, 1);
      __threadfence_block();
      sm.chunk_tag[slot] = chunk + 1;
    } else {
      while (sm.chunk_tag[slot] != chunk + 1) {}
      __threadfence_block();
    }
    const long long first = (long long)sm.chunk_base[slot] * p.chunk;
    token = first + ticket % p.chunk < p.M ? (int)first + ticket % p.chunk : p.M;
  }
  if constexpr (SLICES * P == 1) return __shfl_sync(~0u, token, 0);
  turn ^= 1;
  if (at.leads()) sm.token[turn][at.unit] = token;
  at.sync_token();
  return sm.token[turn][at.unit];
}

__device__ __forceinline__ int count_all(const Params& p, int row, int lane) {
  int sum = 0;
  for (int t = lane; t < (p.N + TILE - 1) / TILE; t += 32) sum += count_of(p, row, t);
  return __reduce_add_sync(~0u, sum);
}

extern "C" __global__ void __launch_bounds__(WARPS * 32, 1) gated_down(const __grid_constant__ Params p) {
  __shared__ Shared sm;
  if (threadIdx.x == 0) sm.next = 0, sm.heavy = -1, sm.suspicious = 0;
  if (threadIdx.x < 4) sm.chunk_tag[threadIdx.x] = 0;
  wait_for_kernels_ahead();
  __syncthreads();
  for (int i = threadIdx.x; i < p.suspect_counts; i += WARPS * 32)
    if (p.suspects[i]) sm.suspicious = 1;
  __syncthreads();
  {
    Token<PARTS> token(p, sm);
    int turn = 0;
    while (true) {
      const int row = next_token(p, sm, token.at, turn);
      if (row >= p.M) break;
      const int nonzeros = count_all(p, row, token.at.lane);
      if (PARTS == 1 && TEAMS > 1 && nonzeros > HEAVY) {
        if (token.at.leads()) p.link[row] = atomicExch(&sm.heavy, row);
      } else {
        token.run(row, nonzeros);
      }
    }
  }
  if constexpr (PARTS == 1 && TEAMS > 1) {
    __syncthreads();
    Token<TEAMS> token(p, sm);
    for (int row = sm.heavy; row >= 0; row = p.link[row]) token.run(row, count_all(p, row, token.at.lane));
  }
}
