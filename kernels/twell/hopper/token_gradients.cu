// The token's side of the backward on the pattern of g, one pass: dx, and du, dg, h of every entry.    sm_90a, bfloat16
//
//   dh = dy @ down^T + dl1 / M * l1_weight * sign(h)     du = dh * g     dg = dh * u     dx = du @ up + dg @ gate
//   Without a gate (GATED = 0): du = dh, dx = du @ up. With a square (SQUARED = 1), g^2 in place of g, and dg, or without
//   a gate du, times 2 g.
//
//   dy, dx: (M, K) bf16     gate, up, down: (N, K) bf16     saved_words, saved_u, saved_rows: as gated_down.cu leaves them
//   records: {token, du, dg, h} of every entry at the index that transpose.cu gave it, float32
//
// A team takes its entries 32 at a time: first the dot products with rows of down, then each lane finishes one entry, then
// rows of up and gate are added.
// Macros: backward.py's `token_macros`, with K and the switches from `backward`.
#include "team.cuh"

struct Params {
  const char *dy, *gate, *up, *down;
  char* dx;  // may be null
  const u32* saved_words;
  const u16* saved_u;       // GATED only
  const int* saved_rows;    // (2, M)
  const u32* record_index;  // of each entry among the records; null where no weight needs a gradient
  uint4* records;
  const float* dl1;        // may be null
  const float* l1_weight;  // (N), WEIGHTED only
  int* link;
  u32* next_chunk;      // zero at the start
  u32* nonfinite;       // zero at the start: whether some token's dy is not finite
  long long dy_stride;  // bytes
  int M, chunk;

  __device__ int nonzeros_of(int row, int) const { return saved_rows[M + row]; }
};
#include "params_check.cuh"  // made by compiler.py from params.py: offsets and sizes are those of the Python side

struct Shared {
  Team team;
};
static_assert(sizeof(Shared) <= 48 * 1024, "static shared memory ends at 48 KB; use more parts");

// One lane's entry.
struct Entry {
  u32 word;
  float u, dh, du, dg;
};

template <int P>
struct Token {
  const Params& p;
  Shared& sm;
  WarpRole<P> at;
  int row, flip;
  float per_token;
  float dx[CHUNKS * 8];

  __device__ Token(const Params& p, Shared& sm) : p(p), sm(sm), flip(0), per_token(p.dl1 ? *p.dl1 / p.M : 0) {}

  // dh of `mine` entries of this part, entry i in lane i.
  __device__ float dot_products(const uint4 (&dy)[CHUNKS], u32 word, int mine) {
    float dh = 0;
    for (int i = 0; i < mine; i += AHEAD) {
      uint4 d[AHEAD][CHUNKS];
#pragma unroll
      for (int a = 0; a < AHEAD; a++) {
        const u32 neuron = __shfl_sync(~0u, word, min(i + a, mine - 1)) & 0xffff;
        load_row(d[a], p.down + (u64)neuron * ROW_BYTES, at.slice, at.lane);
      }
#pragma unroll
      for (int a = 0; a < AHEAD; a++) {
        const float s = total(dot(d[a], dy), at, sm.team, flip);
        if (at.lane == i + a) dh = s;
      }
    }
    return dh;
  }

  __device__ void add_rows(const Entry& e, int mine) {
    for (int i = 0; i < mine; i++) {
      const u64 offset = (u64)(__shfl_sync(~0u, e.word, i) & 0xffff) * ROW_BYTES;
      uint4 u[CHUNKS], g[CHUNKS];
      load_row(u, p.up + offset, at.slice, at.lane);
      if constexpr (GATED) load_row(g, p.gate + offset, at.slice, at.lane);
      add_scaled(dx, __shfl_sync(~0u, e.du, i), u);
      if constexpr (GATED) add_scaled(dx, __shfl_sync(~0u, e.dg, i), g);
    }
  }

  // Entry `index` of the row, in the lane that holds it.
  __device__ void finish_entry(Entry& e, u32 index, bool valid) {
    const float g = high_half(e.word), a = SQUARED ? g * g : g, h = GATED ? a * e.u : a;
    const float l1 = WEIGHTED ? per_token * p.l1_weight[e.word & 0xffff] : per_token;
    if (l1 != 0) e.dh += h > 0 ? l1 : h < 0 ? -l1 : h;  // NaN stays NaN
    const float slope = SQUARED ? 2 * g : 1;
    e.du = e.dh * (GATED ? a : slope);
    e.dg = GATED ? e.dh * e.u * slope : 0;
    if (p.record_index && valid && at.slice == 0)
      p.records[p.record_index[index]] =
          make_uint4(row, __float_as_uint(e.du), __float_as_uint(e.dg), __float_as_uint(h));
  }

  __device__ bool load_dy(uint4 (&dy)[CHUNKS]) {
    u32 seen = 0;
#pragma unroll
    for (int j = 0; j < CHUNKS; j++) {
      dy[j] = inside(at.slice, j, at.lane) ? load_once(p.dy + row * p.dy_stride + element(at.slice, j, at.lane) * 2)
                                           : make_uint4(0, 0, 0, 0);
      seen |= exponent_is_full(dy[j]);
    }
    return total(seen ? 1.f : 0.f, at, sm.team, flip) != 0;
  }

  __device__ void run(int token, int nonzeros) {
    row = token;
    const int start = p.saved_rows[row];
    bool bad = start < 0 || !(fabsf(per_token) < __uint_as_float(0x7f800000));
#pragma unroll
    for (int i = 0; i < CHUNKS * 8; i++) dx[i] = 0;
    if (start < 0) nonzeros = 0;
    int first = 0;
    do {
      // Loaded again for each batch (most tokens have one), because the registers are needed for the rows.
      uint4 dy[CHUNKS];
      bad |= load_dy(dy);
      const int left = nonzeros - first - at.part, mine = max(0, min(32, (left + P - 1) / P)),
                own = at.lane * P + at.part;
      const bool valid = at.lane < mine;
      const u32 index = (u32)start + first + own;
      Entry e = {0, 0, 0, 0, 0};
      if (valid) {
        e.word = p.saved_words[index];
        if constexpr (GATED) e.u = low_half(p.saved_u[index]);
      }
      e.dh = dot_products(dy, e.word, mine);
      finish_entry(e, index, valid);
      if (p.dx) add_rows(e, mine);
      first += 32 * P;
    } while (first < nonzeros);
    if (bad && at.lane == 0) *p.nonfinite = 1;
    if (bad) poison(dx);
    float none = 0;
    add_parts(dx, none, at, sm.team);
    if (at.part == P - 1 && p.dx) store_row(p.dx + (u64)row * ROW_BYTES, dx, at.slice, at.lane);
  }
};

extern "C" __global__ void __launch_bounds__(WARPS * 32, 1) token_gradients(const __grid_constant__ Params p) {
  __shared__ Shared sm;
  for_all_tokens<Token>(p, sm);
}
