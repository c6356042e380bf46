// y = (g * (x @ up^T)) @ down on the pattern of g, one pass: u and h never reach memory.           sm_90a, bfloat16
// Without a gate (GATED = 0): y = g @ down. SQUARED: g^2 in place of g. With SAVE = 1, for training: what the backward
// needs, g and u, is saved, entry by entry. SCREENED: entries of g that are -0 are still to be computed.
//
//   words, counts, spilled: g as gate_pack.cu leaves it     x, y: (M, K) bf16     up, down: (N, K) bf16
//
// For each non-zero a warp reads one row of up (a dot product with x) and one of down (added to y); both come from L2,
// or from L1 when a token at work on the same SM used them just before.
// Macros: inference.py's `Tiling` and `Switches`, by `gated_down_kernel`.
#include "team.cuh"

constexpr int LIST = 256;
static_assert(TILE <= LIST, "a spilled tile must fit into one list");

struct Params {
  const char *x, *up, *down;
  const char* gate;  // SCREENED only
  const u32* words;
  const int* counts;
  const u16* spilled;
  char* y;
  u64* overflow;           // zero at the start: tiles with more non-zeros than slots, and rows that were not saved
  int* nonzeros;           // (M), STATS only
  float* l1;               // (M), STATS only
  const float* l1_weight;  // by neuron, WEIGHTED only
  u8* fired;               // by neuron, STATS only, zero at the start
  int* link;               // (M): lists of long tokens
  u32* next_chunk;         // zero at the start
  const u16* neurons;      // (N): the neurons in the order of the tiles' columns; null: the column's own number
  // SAVE only: each row's entries side by side, wherever there was room, as `saved_words` (the same words) and `saved_u`.
  u32* saved_words;
  u16* saved_u;        // GATED only: bf16
  int* saved_rows;     // (2, M): where a row starts, -1 if it is not saved; how many entries it has
  u64* saved_count;    // zero at the start: entries so far
  u32* nonfinite;      // zero at the start: whether some token's x is not finite
  long long x_stride;  // bytes
  int M, N, chunk;
  u32 capacity;  // SAVE only: of saved_words and saved_u

  __device__ u32 neuron_of(int column) const { return neurons ? neurons[column] : column; }
  __device__ int tiles() const { return (N + TILE - 1) / TILE; }
  __device__ int count_of(int row, int tile) const { return tile < tiles() ? counts[(u64)row * tiles() + tile] : 0; }
  __device__ int nonzeros_of(int row, int lane) const {
    int sum = 0;
    for (int t = lane; t < tiles(); t += 32) sum += count_of(row, t);
    return __reduce_add_sync(~0u, sum);
  }
};
#include "params_check.cuh"  // made by compiler.py from params.py: offsets and sizes are those of the Python side

// How far a token's entries have been listed: the next 32 tiles and the position among their entries, and those of the 32
// tiles before that overflowed and are not listed yet.
struct Cursor {
  int tile, window;
  u32 spilled;
};

struct Shared {
  Team team;
  u32 list[WARPS][LIST];
  Cursor cursor[WARPS];
  int start[WARPS];
};
static_assert(sizeof(Shared) <= 48 * 1024, "static shared memory ends at 48 KB; use more parts");

// One token: what a warp keeps in registers, and the steps on it.
template <int P>
struct Token {
  const Params& p;
  Shared& sm;
  WarpRole<P> at;
  int row, flip;
  int start, done,
      nonzeros;  // SAVE only: where the row's entries go, how many of them have been listed, and of how many
  uint4 x[CHUNKS];
  float y[CHUNKS * 8];
  float l1;

  __device__ Token(const Params& p, Shared& sm) : p(p), sm(sm), flip(0), start(-1), done(0), nonzeros(0) {}

  __device__ void use(u32 word, int index) {
    const u64 offset = (u64)(word & 0xffff) * ROW_BYTES;
    uint4 u[CHUNKS], d[CHUNKS];
    if constexpr (GATED) load_row(u, p.up + offset, at.slice, at.lane);
    load_row(d, p.down + offset, at.slice, at.lane);
    float h = high_half(word);
    if constexpr (SQUARED) h *= h;
    if constexpr (GATED) {
      const float s = total(dot(u, x), at, sm.team, flip);
      h *= s;
      if (SAVE && start >= 0 && index < nonzeros && at.slice == 0 && at.lane == 0)
        p.saved_u[(u32)start + index] = (u16)to_halves(s, 0);
    }
    if (SAVE && start >= 0 && index < nonzeros && at.slice == 0 && at.lane == 0)
      p.saved_words[(u32)start + index] = word;
    if constexpr (STATS) l1 += WEIGHTED ? fabsf(h) * p.l1_weight[word & 0xffff] : fabsf(h);
    add_scaled(y, h, d);
  }

  // Computes the marked entries of this part and keeps, in the same order, all that are not 0; returns their end. -Inf
  // stays, as -0: where x is not finite, 0 times the product with up, which is neither, must reach y as NaN.
  __device__ int settle(int entries) {
    u32* list = sm.list[at.warp];
    int end = at.part;
    for (int i = at.part; i < entries; i += P) {
      u32 word = list[i];
      if (word >> 31) {
        uint4 w[CHUNKS];
        load_row(w, p.gate + (u64)(word & 0xffff) * ROW_BYTES, at.slice, at.lane);
        const float g = total(dot(w, x), at, sm.team, flip);
        if (g != __uint_as_float(0xff800000)) word = to_relu_halves(0, g) | (word & 0xffff);
      }
      __syncwarp();  // a lane that lags may still read list[end]
      if (word >> 16) list[end] = word, end += P;
    }
    __syncwarp();
    return end;
  }

  __device__ void use_list(int entries) {
    __syncwarp();
    if constexpr (SCREENED) entries = settle(entries);
    for (int i = at.part; i < entries; i += P) use(sm.list[at.warp][i], done + i);
    if constexpr (SAVE) done += entries;
    __syncwarp();
  }

  __device__ void append(int slot, u32 word) {
    sm.list[at.warp][slot] = word;
    if constexpr (STATS) {
      u8* fired = p.fired + (word & 0xffff);
      if (!*(volatile u8*)fired) *fired = 1;
    }
  }

  // Fills this warp's list with the token's next entries; false if these were the last. Lists 32 tiles at a time, then
  // those of them that overflowed one by one. One loop for both, so that the code that uses the entries is instantiated
  // once: it needs nearly all registers.
  __device__ bool fill_list(int& entries) {
    Cursor c = sm.cursor[at.warp];
    const int tiles = p.tiles();
    __syncwarp();
    if (c.spilled) {
      entries = list_spilled(c.tile - 32 + __ffs(c.spilled) - 1);
      c.spilled &= c.spilled - 1;
    } else {
      const int count = p.count_of(row, c.tile + at.lane), all = list_tiles(c, count <= SLOTS ? count : 0);
      entries = min(LIST, all - c.window);
      c.window += LIST;
      if (c.window >= all) {
        c.spilled = __ballot_sync(~0u, count > SLOTS);
        if (c.spilled && at.leads()) atomicAdd(p.overflow, __popc(c.spilled));
        c.tile += 32, c.window = 0;
      }
    }
    if (at.lane == 0) sm.cursor[at.warp] = c;
    return c.spilled || c.tile < tiles;
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
    const u32* from = p.words + ((u64)row * (p.tiles()) + c.tile + at.lane) * SLOTS - begin;
    for (int i = max(begin, c.window); i < last; i++) append(i - c.window, from[i]);
    return __shfl_sync(~0u, end, 31);
  }

  // A tile that overflowed: its dense row was written beside the format, with what columns past the end have.
  __device__ int list_spilled(int tile) {
    const u16* from = p.spilled + ((u64)row * (p.tiles()) + tile) * TILE;
    int entries = 0;
    for (int c = 0; c < TILE; c += 32) {
      const int column = tile * TILE + c + at.lane;
      const u32 bits = column < p.N ? from[c + at.lane] : 0, active = __ballot_sync(~0u, bits != 0);
      if (bits) append(entries + __popc(active & ((1u << at.lane) - 1)), bits << 16 | p.neuron_of(column));
      entries += __popc(active);
    }
    return entries;
  }

  // Room for the entries that the backward needs. A row that finds none is counted; such a row, and one whose gradients
  // cannot be finite anyway, has no start.
  __device__ int reserve(int nonzeros, bool bad) {
    int start = -1;
    if (at.leads()) {
      if (bad) {
        *p.nonfinite = 1;
      } else {
        const u64 end = atomicAdd(p.saved_count, (u64)nonzeros) + nonzeros;
        if (end <= p.capacity)
          start = (int)(end - nonzeros);
        else
          atomicAdd(p.overflow, 1);
      }
      p.saved_rows[row] = start, p.saved_rows[p.M + row] = nonzeros;
    }
    if constexpr (SLICES * P == 1) return __shfl_sync(~0u, start, 0);
    if (at.leads()) sm.start[at.unit] = start;
    at.sync_token();
    start = sm.start[at.unit];
    at.sync_token();
    return start;
  }

  __device__ void run(int token, int count) {
    row = token, l1 = 0;
    bool bad = false;
    if constexpr (GATED || SAVE) {
#pragma unroll
      for (int j = 0; j < CHUNKS; j++)
        x[j] = inside(at.slice, j, at.lane) ? load_once(p.x + row * p.x_stride + element(at.slice, j, at.lane) * 2)
                                            : make_uint4(0, 0, 0, 0);
      bad = total(any_nonfinite(x) ? 1.f : 0.f, at, sm.team, flip) != 0 && count < p.N;
    }
    if constexpr (SAVE) nonzeros = count, done = 0, start = reserve(count, bad);
#pragma unroll
    for (int i = 0; i < CHUNKS * 8; i++) y[i] = 0;
    if (at.lane == 0) sm.cursor[at.warp] = Cursor{0, 0, 0};
    __syncwarp();
    bool more = true;
    while (more) {
      int entries;
      more = fill_list(entries);
      use_list(entries);
    }
    if (GATED && bad) poison(y), l1 = __uint_as_float(0x7fffffff);
    finish(count);
  }

  __device__ void finish(int nonzeros) {
    add_parts(y, l1, at, sm.team);
    if (at.part != P - 1) return;
    store_row(p.y + (u64)row * ROW_BYTES, y, at.slice, at.lane);
    if (STATS && at.slice == 0 && at.lane == 0) p.nonzeros[row] = nonzeros, p.l1[row] = l1;
  }
};

extern "C" __global__ void __launch_bounds__(WARPS * 32, 1) gated_down(const __grid_constant__ Params p) {
  __shared__ Shared sm;
  wait_for_kernels_ahead();
  for_all_tokens<Token>(p, sm);
}
