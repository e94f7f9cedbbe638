// Codes as panels hold them: by units, so many of one output in so many words of 32 bits.
//
//   bytes             4 codes, a word
//   four bits         8 codes, a word, the first lowest
//   INT6              16 codes, three words: two of low nibbles, then one of the pairs of high bits
//   UINT2, INT2       16 codes, a word: bits 2p, 2p + 1 of byte b are code 4p + b
//   INT3, IQ1, IQ2    16 codes, a word as those of two bits; the third bits of two units are a word
//                     behind both: bit 4u + p of byte b is of code 4p + b of unit u
//   IQ2_XXS           32 codes, two words: four indexes of eight codes; four signs of seven bits each
//                     and, on top, the scale of four bits
//   IQ3_XXS           32 codes, three words: indexes 0, 2, 4, 6 of four codes; 1, 3, 5, 7; a word of signs
//
// Codes of less than four bits are made bytes of first, four of each output at a time and lifted so that
// none is negative: `four_codes`. What a build has of its own are the few steps that this takes.
#pragma once

#include <type_traits>

#include "vec.h"

namespace vn {
namespace VN_BUILD {

// What codes of less than four bits are once they are bytes, sixteen to a unit: those of two and three
// bits, and those of tables. These two stand for seven kinds of files.
constexpr int kNarrowBytes = 100, kWideBytes = 101;

// Codes of a unit; its words; and words of two units side by side, where they share one.
struct UnitShape {
  int codes, words;
  bool shares_word;
};
constexpr UnitShape unit_shape(int32_t kind) {
  switch (kind) {
    case VN_CODE_INT8:
    case VN_CODE_E4M3:
      return {4, 1, false};
    case VN_CODE_INT6:
      return {16, 3, false};
    case VN_CODE_UINT2:
    case VN_CODE_INT2:
    case kNarrowBytes:
    case kWideBytes:
      return {16, 1, false};
    case VN_CODE_INT3:
    case VN_CODE_IQ1:
    case VN_CODE_IQ2:
      return {16, 2, true};
    case VN_CODE_IQ2_XXS:
      return {32, 2, false};
    case VN_CODE_IQ3_XXS:
      return {32, 3, false};
    default:
      return {8, 1, false};
  }
}
template <int Kind>
constexpr int kUnitCodes = unit_shape(Kind).codes;
template <int Kind>
constexpr int kUnitWords = unit_shape(Kind).words;
// So many words of 32 bits hold so many units of one output.
constexpr int64_t count_words(int32_t kind, int64_t units) {
  const UnitShape shape = unit_shape(kind);
  return shape.shares_word ? ceil_div(units, 2) * 3 : units * shape.words;
}

// Which inputs meet the four codes of a step: those so far apart, of a run of four times as many.
constexpr int input_spread(int32_t kind) {
  switch (kind) {
    case VN_CODE_IQ2_XXS:
    case VN_CODE_IQ3_XXS:
      return 8;
    case VN_CODE_INT8:
    case VN_CODE_UINT2:
    case VN_CODE_INT2:
    case VN_CODE_INT3:
    case VN_CODE_IQ1:
    case VN_CODE_IQ2:
      return 1;
    case VN_CODE_INT6:
    default:
      return 2;
  }
}

// Whether codes are made bytes of before all else.
template <int Kind>
constexpr bool kIsLow = Kind >= VN_CODE_UINT2 && Kind <= VN_CODE_IQ3_XXS;

// The kind of a kind's codes as bytes.
constexpr int kind_of_bytes(int kind) {
  switch (kind) {
    case VN_CODE_UINT2:
    case VN_CODE_INT2:
    case VN_CODE_INT3:
      return kNarrowBytes;
    case VN_CODE_IQ1:
    case VN_CODE_IQ2:
    case VN_CODE_IQ2_XXS:
    case VN_CODE_IQ3_XXS:
      return kWideBytes;
    default:
      return kind;
  }
}

// Of codes of a table: what each of its numbers stands for.
constexpr int8_t kIq1Values[8] = {-9, -7, -1, 1, 7, 9, 0, 0};
constexpr int8_t kIq2Values[8] = {8, 25, 43, 0, -8, -25, -43, 0};
constexpr int8_t kIq3Values[16] = {4,  12,  20,  28,  36,  44,  52,  62,
                                   -4, -12, -20, -28, -36, -44, -52, -62};
// What is added to such codes so that none is negative.
constexpr int low_lift(int32_t kind) {
  switch (kind) {
    case VN_CODE_INT2:
      return 1;
    case VN_CODE_INT3:
      return 4;
    case VN_CODE_IQ1:
      return 9;
    case VN_CODE_IQ2:
    case VN_CODE_IQ2_XXS:
      return 43;
    case VN_CODE_IQ3_XXS:
      return 62;
    default:
      return 0;
  }
}

// Sixteen bytes to be looked up, by numbers of four bits.
struct ByteTable {
  alignas(16) uint8_t bytes[16];
};
template <int Kind>
constexpr ByteTable make_lifted_table() {
  ByteTable table = {};
  for (int i = 0; i < 16; ++i) {
    const int value = Kind == VN_CODE_IQ1       ? kIq1Values[i % 8]
                      : Kind == VN_CODE_IQ3_XXS ? kIq3Values[i]
                                                : kIq2Values[i % 8];
    table.bytes[i] = static_cast<uint8_t>(value + low_lift(Kind));
  }
  return table;
}
constexpr int parity(int bits) { return (bits ^ bits >> 1 ^ bits >> 2 ^ bits >> 3) & 1; }
// Eight for the numbers of which an odd number of bits is set.
constexpr ByteTable make_parities() {
  ByteTable table = {};
  for (int i = 0; i < 16; ++i) table.bytes[i] = static_cast<uint8_t>(8 * parity(i));
  return table;
}
// Two of four bits of a number, moved to two places of a byte. Of the upper four, the last one is what
// makes the number of ones even, with that of the lower four in its place.
constexpr ByteTable make_sign_table(int first, int second, int first_place, int second_place,
                                    bool is_upper) {
  ByteTable table = {};
  for (int i = 0; i < 16; ++i) {
    const int bits = is_upper ? (i & 7) | parity(i) << 3 : i;
    table.bytes[i] = static_cast<uint8_t>((bits >> first & 1) << first_place |
                                          (bits >> second & 1) << second_place);
  }
  return table;
}

// ---- what a build has: steps of all words ------------------------------------------------------

#if defined(__AVX512F__)

// Shifts words: down, or up by less than nothing. Bytes take bits of their neighbours.
template <int N>
VN_INLINE Words shifted(Words w) {
  if constexpr (N > 0) return {_mm512_srli_epi32(w.v, N)};
  if constexpr (N < 0) return {_mm512_slli_epi32(w.v, -N)};
  return w;
}
VN_INLINE Words shifted_by(Words w, int bits) {
  return {_mm512_srl_epi32(w.v, _mm_cvtsi32_si128(bits))};
}
VN_INLINE Words masked(Words w, uint32_t bits) {
  return {_mm512_and_si512(w.v, _mm512_set1_epi32(static_cast<int>(bits)))};
}
VN_INLINE Words joined(Words a, Words b) { return {_mm512_or_si512(a.v, b.v)}; }
VN_INLINE Words differing(Words a, Words b) { return {_mm512_xor_si512(a.v, b.v)}; }
VN_INLINE __m512i wide_table(const uint8_t* bytes) {
  return _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes)));
}
// Bytes of a table, by the low four bits of bytes below 128.
VN_INLINE Words looked_up(const ByteTable& table, Words numbers) {
  return {_mm512_shuffle_epi8(wide_table(table.bytes), numbers.v)};
}
#if !defined(__AVX512VBMI__)
// Bytes of a table of 256, by bytes: the low four bits find one in each sixteenth, the others which.
VN_INLINE Words looked_up(const uint8_t* table, Words indexes) {
  const __m512i low = _mm512_and_si512(indexes.v, _mm512_set1_epi8(15));
  const __mmask64 by_bit[4] = {_mm512_movepi8_mask(_mm512_slli_epi16(indexes.v, 3)),
                               _mm512_movepi8_mask(_mm512_slli_epi16(indexes.v, 2)),
                               _mm512_movepi8_mask(_mm512_slli_epi16(indexes.v, 1)),
                               _mm512_movepi8_mask(indexes.v)};
  __m512i found[8];
  each<8>([&](auto i) VN_NOW {
    const __m512i first = _mm512_shuffle_epi8(wide_table(table + 32 * i), low);
    found[i] = _mm512_mask_shuffle_epi8(first, by_bit[0], wide_table(table + 32 * i + 16), low);
  });
  each<4>([&](auto i) VN_NOW {
    found[i] = _mm512_mask_blend_epi8(by_bit[1], found[2 * i], found[2 * i + 1]);
  });
  const __m512i lower = _mm512_mask_blend_epi8(by_bit[2], found[0], found[1]);
  const __m512i upper = _mm512_mask_blend_epi8(by_bit[2], found[2], found[3]);
  return {_mm512_mask_blend_epi8(by_bit[3], lower, upper)};
}
#endif
// Sixteen bytes as words, without and with signs.
inline Words load_bytes(const uint8_t* p) {
  return {_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
inline Words load_signed_bytes(const uint8_t* p) {
  return {_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
inline Words fill_words(uint32_t x) { return {_mm512_set1_epi32(static_cast<int>(x))}; }
inline void store_words(int32_t* p, Words w) { _mm512_storeu_si512(p, w.v); }
inline Vec floats_of(Words w) { return {_mm512_cvtepi32_ps(w.v)}; }

#elif defined(__AVX2__)

template <int N>
VN_INLINE Words shifted(Words w) {
  if constexpr (N > 0) return {_mm256_srli_epi32(w.a, N), _mm256_srli_epi32(w.b, N)};
  if constexpr (N < 0) return {_mm256_slli_epi32(w.a, -N), _mm256_slli_epi32(w.b, -N)};
  return w;
}
VN_INLINE Words shifted_by(Words w, int bits) {
  const __m128i count = _mm_cvtsi32_si128(bits);
  return {_mm256_srl_epi32(w.a, count), _mm256_srl_epi32(w.b, count)};
}
VN_INLINE Words masked(Words w, uint32_t bits) {
  const __m256i own = _mm256_set1_epi32(static_cast<int>(bits));
  return {_mm256_and_si256(w.a, own), _mm256_and_si256(w.b, own)};
}
VN_INLINE Words joined(Words a, Words b) {
  return {_mm256_or_si256(a.a, b.a), _mm256_or_si256(a.b, b.b)};
}
VN_INLINE Words differing(Words a, Words b) {
  return {_mm256_xor_si256(a.a, b.a), _mm256_xor_si256(a.b, b.b)};
}
VN_INLINE __m256i wide_table(const uint8_t* bytes) {
  return _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes)));
}
VN_INLINE Words looked_up(const ByteTable& table, Words numbers) {
  const __m256i all = wide_table(table.bytes);
  return {_mm256_shuffle_epi8(all, numbers.a), _mm256_shuffle_epi8(all, numbers.b)};
}
// Bytes of a table of 256, by bytes: the low four bits find one in each sixteenth, the others which. A number
// with its top bit finds nothing, so of two sixteenths either finds what is joined; a choice of others
// looks at the top bit of a byte. These steps have units of their own, so that they run beside one another.
struct TableIndexes {
  __m256i all, even, odd;
};
template <int Bit>
VN_INLINE __m256i find_sixteenths(const uint8_t* table, const TableIndexes& indexes) {
  if constexpr (Bit == 4) {
    return _mm256_or_si256(_mm256_shuffle_epi8(wide_table(table), indexes.even),
                           _mm256_shuffle_epi8(wide_table(table + 16), indexes.odd));
  } else {
    const __m256i first = find_sixteenths<Bit - 1>(table, indexes);
    const __m256i second = find_sixteenths<Bit - 1>(table + (1 << Bit), indexes);
    return _mm256_blendv_epi8(first, second, _mm256_slli_epi16(indexes.all, 7 - Bit));
  }
}
VN_INLINE __m256i looked_up_half(const uint8_t* table, __m256i indexes) {
  const __m256i top = _mm256_set1_epi8(-128);
  const __m256i even = _mm256_or_si256(_mm256_and_si256(indexes, _mm256_set1_epi8(15)),
                                       _mm256_and_si256(_mm256_slli_epi16(indexes, 3), top));
  return find_sixteenths<7>(table, {indexes, even, _mm256_xor_si256(even, top)});
}
VN_INLINE Words looked_up(const uint8_t* table, Words indexes) {
  return {looked_up_half(table, indexes.a), looked_up_half(table, indexes.b)};
}
inline __m128i load_eight_bytes(const uint8_t* p) {
  return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
}
inline Words load_bytes(const uint8_t* p) {
  return {_mm256_cvtepu8_epi32(load_eight_bytes(p)), _mm256_cvtepu8_epi32(load_eight_bytes(p + 8))};
}
inline Words load_signed_bytes(const uint8_t* p) {
  return {_mm256_cvtepi8_epi32(load_eight_bytes(p)), _mm256_cvtepi8_epi32(load_eight_bytes(p + 8))};
}
inline Words fill_words(uint32_t x) {
  return {_mm256_set1_epi32(static_cast<int>(x)), _mm256_set1_epi32(static_cast<int>(x))};
}
inline void store_words(int32_t* p, Words w) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), w.a);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p) + 1, w.b);
}
inline Vec floats_of(Words w) { return {_mm256_cvtepi32_ps(w.a), _mm256_cvtepi32_ps(w.b)}; }

#else

#define VN_EACH_WORD(expression)                               \
  Words result;                                                \
  for (int i = 0; i < kLanes; ++i) result.v[i] = (expression); \
  return result
template <int N>
inline Words shifted(const Words& w) {
  VN_EACH_WORD(N < 0 ? w.v[i] << -N : w.v[i] >> N);
}
inline Words shifted_by(const Words& w, int bits) { VN_EACH_WORD(w.v[i] >> bits); }
inline Words masked(const Words& w, uint32_t bits) { VN_EACH_WORD(w.v[i] & bits); }
inline Words joined(const Words& a, const Words& b) { VN_EACH_WORD(a.v[i] | b.v[i]); }
inline Words differing(const Words& a, const Words& b) { VN_EACH_WORD(a.v[i] ^ b.v[i]); }
inline uint32_t look_up_four(const uint8_t* table, uint32_t word, uint32_t bits) {
  uint32_t found = 0;
  for (int b = 0; b < 32; b += 8) found |= uint32_t{table[word >> b & bits]} << b;
  return found;
}
inline Words looked_up(const ByteTable& table, const Words& numbers) {
  VN_EACH_WORD(look_up_four(table.bytes, numbers.v[i], 15));
}
inline Words looked_up(const uint8_t* table, const Words& indexes) {
  VN_EACH_WORD(look_up_four(table, indexes.v[i], 255));
}
inline Words load_bytes(const uint8_t* p) { VN_EACH_WORD(p[i]); }
inline Words load_signed_bytes(const uint8_t* p) {
  VN_EACH_WORD(static_cast<uint32_t>(static_cast<int8_t>(p[i])));
}
inline Words fill_words(uint32_t x) { VN_EACH_WORD(x); }
#undef VN_EACH_WORD
inline void store_words(int32_t* p, const Words& w) { std::memcpy(p, w.v, sizeof(w.v)); }
inline Vec floats_of(const Words& w) {
  Vec result;
  for (int i = 0; i < kLanes; ++i) result.v[i] = static_cast<float>(static_cast<int32_t>(w.v[i]));
  return result;
}

#endif

// Sixteen whole numbers of a kind of scales (vn_scale_kind) that are such.
constexpr bool is_whole_scale(int32_t kind) {
  return kind == VN_SCALE_INT8 || kind == VN_SCALE_LOW4 || kind == VN_SCALE_HIGH4 ||
         kind == VN_SCALE_IN_CODES;
}
template <int Half>
VN_INLINE Words load_nibbles(const uint8_t* p) {
  return Half == 1 ? shifted<4>(load_bytes(p)) : masked(load_bytes(p), 15);
}
// 2s + 1 of top nibbles s.
VN_INLINE Words load_odd_numbers(const uint32_t* p) {
  return joined(masked(shifted<27>(load_words(p)), 30), fill_words(1));
}

// ---- units -------------------------------------------------------------------------------------

constexpr bool has_indexes(int32_t kind) {
  return kind == VN_CODE_IQ2_XXS || kind == VN_CODE_IQ3_XXS;
}
#if defined(__AVX512VBMI__)
constexpr int kIndexedWords = 6;
#else
constexpr int kIndexedWords = 4;
#endif

// A unit of codes of sixteen outputs: its words, of the kinds with indexes what stands for these.
template <int Kind>
struct Unit {
  Words words[has_indexes(Kind) ? kIndexedWords : kUnitWords<Kind>];
};

#if defined(__AVX512VBMI__)

// A look-up reads six bits of a byte, and finds the same whatever stands in those that do not count: so
// each of two codes of a byte is found where it is, in a table of its own.
//
// IQ2_XXS: words of codes 0 and 1 of each index's eight, of 2 and 3, of 4 and 5, of 6 and 7. Bits of a byte:
//   first, third     0-1 and 2-3 the digits of both codes, 4 and 5 their signs
//   second, fourth   2-3 and 4-5; 0 and 1
// IQ3_XXS: words of codes 0 and 1 of each even index's four, of 2 and 3; the same of odd ones: digits, bits
// 0-2 and 3-5. Behind them two of signs, from which one is put beside a digit, over the other's bits.
template <int Size>
struct ByteTables {
  alignas(64) uint8_t bytes[Size];
};
// Of bytes whose bits from kDigit on are a digit and kSign its sign: lifted values.
template <int Kind, int kDigit, int kSign>
constexpr ByteTables<64> make_value_table() {
  constexpr int kBits = Kind == VN_CODE_IQ3_XXS ? 3 : 2;
  constexpr ByteTable kLifted = make_lifted_table<Kind>();
  ByteTables<64> table = {};
  for (int i = 0; i < 64; ++i) {
    table.bytes[i] = kLifted.bytes[(i >> kDigit & ((1 << kBits) - 1)) | (i >> kSign & 1) << kBits];
  }
  return table;
}
// The bits of a byte in which the signs of eight codes are.
template <int Kind>
constexpr int sign_place(int code) {
  constexpr int kOfIq2[8] = {4, 5, 0, 1, 6, 7, 2, 3}, kOfIq3[8] = {3, 0, 4, 1, 5, 2, 7, 6};
  return Kind == VN_CODE_IQ3_XXS ? kOfIq3[code] : kOfIq2[code];
}
// Of seven signs all eight, of which an even number is set.
template <int Kind>
constexpr ByteTables<128> make_signs() {
  ByteTables<128> table = {};
  for (int i = 0; i < 128; ++i) {
    const int signs = i | parity(i ^ i >> 4) << 7;
    for (int k = 0; k < 8; ++k) {
      table.bytes[i] |= static_cast<uint8_t>((signs >> k & 1) << sign_place<Kind>(k));
    }
  }
  return table;
}

// In each byte kBits of one, the others of another.
template <uint8_t kBits>
VN_INLINE __m512i joined_bits(__m512i own, __m512i others) {
  return _mm512_ternarylogic_epi32(own, others, _mm512_set1_epi8(static_cast<char>(kBits)), 0xe4);
}

// What indexes and signs are looked up in, in registers: two tables of 256 bytes, and one of 128.
template <int Kind>
struct IndexTables {
  __m512i digits[8], signs[2];

  VN_INLINE explicit IndexTables(const uint8_t* tables) {
    [[maybe_unused]] static constexpr ByteTables<128> kSigns = make_signs<Kind>();
    each<8>([&](auto i) VN_NOW {
      digits[i] = _mm512_loadu_si512(tables + 64 * i);
      if constexpr (Kind == VN_CODE_IQ3_XXS) {
        // From four bits apart to three.
        digits[i] = joined_bits<7>(digits[i], _mm512_srli_epi16(digits[i], 1));
      }
    });
    each<2>([&](auto i) VN_NOW { signs[i] = _mm512_load_si512(kSigns.bytes + 64 * i); });
  }
  template <int Table>
  VN_INLINE __m512i find_digits(__m512i indexes) const {
    const __m512i* own = digits + 4 * Table;
    const __m512i low = _mm512_permutex2var_epi8(own[0], indexes, own[1]);
    const __m512i high = _mm512_permutex2var_epi8(own[2], indexes, own[3]);
    return _mm512_mask_blend_epi8(_mm512_movepi8_mask(indexes), low, high);
  }
  VN_INLINE __m512i find_signs(__m512i word) const {
    const __m512i sevens = _mm512_set1_epi64(0x352e2720150e0700);
    return _mm512_permutex2var_epi8(signs[0], _mm512_multishift_epi64_epi8(sevens, word), signs[1]);
  }
};

template <int Kind>
VN_INLINE Unit<Kind> find_indexed(const Words* stored, const IndexTables<Kind>& codebook) {
  Unit<Kind> unit;
  const __m512i signs = codebook.find_signs(stored[kUnitWords<Kind> - 1].v);
  if constexpr (Kind == VN_CODE_IQ2_XXS) {
    each<2>([&](auto i) VN_NOW {
      const __m512i digits = codebook.template find_digits<i>(stored[0].v);
      const __m512i own = i == 0 ? signs : _mm512_srli_epi32(signs, 2);
      const __m512i moved = _mm512_srli_epi32(digits, 2);
      unit.words[2 * i] = {joined_bits<0x0f>(digits, own)};
      unit.words[2 * i + 1] = {joined_bits<0x3c>(moved, own)};
    });
  } else {
    each<4>([&](auto i) VN_NOW {
      unit.words[i] = {codebook.template find_digits<i % 2>(stored[i / 2].v)};
    });
    unit.words[4] = {signs};
    unit.words[5] = {_mm512_srli_epi32(signs, 4)};
  }
  return unit;
}

template <int Kind, int Part>
VN_INLINE Words indexed_codes(const Unit<Kind>& unit) {
  __m512i numbers = unit.words[Part / 2].v;
  constexpr bool kIsWide = Kind == VN_CODE_IQ3_XXS;
  constexpr int kDigit = kIsWide ? Part % 2 * 3 : Part % 4 / 2 * 2 + Part % 2 * 2;
  constexpr int kMoved = kIsWide ? (Part < 6 ? 0 : 4) : (Part < 4 ? 0 : 2);
  if constexpr (kIsWide) {
    constexpr uint8_t kBits = Part % 2 == 0 ? 0x07 : 0x38;
    numbers = joined_bits<kBits>(numbers, unit.words[kMoved == 0 ? 4 : 5].v);
  }
  static constexpr auto kTable = make_value_table<Kind, kDigit, sign_place<Kind>(Part) - kMoved>();
  return {_mm512_permutexvar_epi8(numbers, _mm512_load_si512(kTable.bytes))};
}

#else

// What indexes are looked up in: two tables of 256 bytes.
template <int Kind>
struct IndexTables {
  const uint8_t* tables;
  explicit IndexTables(const uint8_t* own) : tables(own) {}
};

// The signs of the four words below, of a word that has seven bits of each run of eight codes: the eighth
// makes the number of minus signs even.
template <int Kind>
VN_INLINE void spread_signs(Words w, Words* signs) {
  constexpr bool kIsWide = Kind == VN_CODE_IQ3_XXS;
  constexpr int kSecond = kIsWide ? 1 : 2, kNext = kIsWide ? 2 : 1, kPlace = kIsWide ? 3 : 2;
  static constexpr ByteTable kParities = make_parities();
  const Words halves = joined(masked(w, 0x3fffu), masked(shifted<-2>(w), 0x3fff0000u));
  const Words seven = joined(masked(halves, 0x007f007fu), masked(shifted<-1>(halves), 0x7f007f00u));
  const Words low = masked(seven, 0x0f0f0f0fu);
  const Words high = joined(masked(shifted<4>(seven), 0x07070707u), looked_up(kParities, low));
  each<4>([&](auto i) VN_NOW {
    constexpr int kFirst = i % 2 * kNext;
    static constexpr ByteTable kTable =
        make_sign_table(kFirst, kFirst + kSecond, kPlace, kPlace + 4, i >= 2);
    signs[i] = looked_up(kTable, i < 2 ? low : high);
  });
}

// Numbers of codes' values in a table, two to a byte. IQ2_XXS: of codes 0 and 2 of each index's eight, of 1
// and 3, of 4 and 6, of 5 and 7: three bits each, of which the third is a sign. IQ3_XXS: of codes 0 and 1 of
// each even index's four, of 2 and 3; the same of odd ones: four bits each.
template <int Kind>
VN_INLINE Unit<Kind> find_indexed(const Words* stored, const IndexTables<Kind>& codebook) {
  Unit<Kind> unit;
  if constexpr (Kind == VN_CODE_IQ2_XXS) {
    Words signs[4];
    spread_signs<Kind>(stored[1], signs);
    each<2>([&](auto i) VN_NOW {
      const Words digits = looked_up(codebook.tables + 256 * i, stored[0]);
      unit.words[2 * i] = joined(masked(digits, 0x33333333u), signs[2 * i]);
      unit.words[2 * i + 1] = joined(masked(shifted<2>(digits), 0x33333333u), signs[2 * i + 1]);
    });
  } else {
    spread_signs<Kind>(stored[2], unit.words);
    each<4>([&](auto i) VN_NOW {
      unit.words[i] = joined(unit.words[i], looked_up(codebook.tables + 256 * (i % 2), stored[i / 2]));
    });
  }
  return unit;
}

template <int Kind, int Part>
VN_INLINE Words indexed_codes(const Unit<Kind>& unit) {
  static constexpr ByteTable kTable = make_lifted_table<Kind>();
  if constexpr (Kind == VN_CODE_IQ2_XXS) {
    // A look-up reads the low four bits of bytes below 128.
    return looked_up(kTable, shifted<Part % 4 / 2 * 4>(unit.words[Part / 4 * 2 + Part % 2]));
  } else {
    return looked_up(kTable, masked(shifted<Part % 2 * 4>(unit.words[Part / 2]), 0x0f0f0f0fu));
  }
}

#endif

// What the indexes of a kind of codes are looked up in, if it has any.
struct NoTables {
  explicit NoTables(const uint8_t*) {}
};
template <int Kind>
using Codebook = std::conditional_t<has_indexes(Kind), IndexTables<Kind>, NoTables>;

// A unit of the words as they are stored.
template <int Kind>
VN_INLINE Unit<Kind> make_unit(const Words* stored, const Codebook<Kind>& codebook) {
  if constexpr (has_indexes(Kind)) {
    return find_indexed<Kind>(stored, codebook);
  } else {
    Unit<Kind> unit;
    each<kUnitWords<Kind>>([&](auto i) VN_NOW { unit.words[i] = stored[i]; });
    return unit;
  }
}

// Four codes of each output as bytes, lifted: step `Part` of a unit.
template <int Kind, int Part>
VN_INLINE Words four_codes(const Unit<Kind>& unit) {
  if constexpr (has_indexes(Kind)) {
    return indexed_codes<Kind, Part>(unit);
  } else {
    const Words pairs = masked(shifted<2 * Part>(unit.words[0]), 0x03030303u);
    if constexpr (Kind == VN_CODE_UINT2 || Kind == VN_CODE_INT2) return pairs;
    const Words codes = joined(pairs, masked(shifted<Part - 2>(unit.words[1]), 0x04040404u));
    if constexpr (Kind == VN_CODE_INT3) return codes;
    static constexpr ByteTable kTable = make_lifted_table<Kind>();
    return looked_up(kTable, codes);
  }
}

#if !defined(__AVX2__)
template <int Byte, int Lift>
inline Vec byte_of(const Words& w) {
  Vec result;
  for (int i = 0; i < kLanes; ++i) {
    result.v[i] = static_cast<float>(static_cast<int>(w.v[i] >> 8 * Byte & 255) - Lift);
  }
  return result;
}
#elif defined(__AVX512F__)
template <int Byte, int Lift>
VN_INLINE Vec byte_of(Words w) {
  return {mantissa_bits<8, 8 * Byte, 0, Lift>(w.v)};
}
#else
template <int Byte, int Lift>
VN_INLINE Vec byte_of(Words w) {
  return {mantissa_bits<8, 8 * Byte, 0, Lift>(w.a), mantissa_bits<8, 8 * Byte, 0, Lift>(w.b)};
}
#endif

// Codes of a unit that are made bytes of together, a part at a time; of other kinds all.
template <int Kind>
constexpr int kRunCodes = kIsLow<Kind> || Kind == VN_CODE_INT6 ? 4 * input_spread(Kind) : kUnitCodes<Kind>;

// The values of a run of a unit's codes, as floats.
template <int Kind>
struct RunValues {
  static constexpr int kWords = kIsLow<Kind> || Kind == VN_CODE_INT6 ? input_spread(Kind) : 1;
  Words words[kWords];

  template <int Run>
  VN_INLINE void read(const Unit<Kind>& unit) {
    each<kWords>([&](auto i) VN_NOW {
      constexpr int kPart = Run * kWords + i;
      if constexpr (kIsLow<Kind>) {
        words[i] = four_codes<Kind, kPart>(unit);
      } else if constexpr (Kind == VN_CODE_INT6) {
        words[i] = six_bits<kPart>(unit.words[Run], unit.words[2]);
      } else {
        words[i] = unit.words[0];
      }
    });
  }
  // Of code J of the run.
  template <int J>
  VN_INLINE Vec of() const {
    if constexpr (kIsLow<Kind>) {
      return byte_of<J / kWords, low_lift(Kind)>(words[J % kWords]);
    } else if constexpr (Kind == VN_CODE_INT6) {
      return code_of<VN_CODE_INT6, J / kWords>(words[J % kWords]);
    } else {
      return code_of<Kind, J>(words[0]);
    }
  }
};

}  // namespace VN_BUILD
}  // namespace vn
