/* MD5 of many messages at a time (RFC 1321), each in a lane of a vector.

   A step of MD5 needs the result of the step before, so one message leaves most of a processor idle. The vectors are GCC's
   and Clang's, which compile them for any processor. With AVX2 two take no longer than one, and four much less than twice
   as long, so these are taken together. A lane whose message ends takes the next one. */

enum { LANES = 8, MOST_SETS = 4, BLOCK_WORDS = 16, BLOCK_BYTES = 64, LENGTH_AT = 56 };

/* A word of each lane of a set. */
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));

#define INLINE static inline __attribute__((always_inline))

typedef struct {
    Md5Message *message;      /* NULL: the lane is idle */
    const unsigned char *at;  /* the next whole block */
    size_t whole, left;       /* how many whole blocks are left; with those of the tail */
    unsigned char tail[2 * BLOCK_BYTES]; /* the end of the message, padded */
    unsigned char *tail_end;
} Lane;

static const uint32_t INITIAL[4] = {0x67452301, 0xefcdab89, 0x98badcfe, 0x10325476};

/* What idle lanes read. */
static const unsigned char IDLE[BLOCK_BYTES];

static const uint32_t SINES[64] = {
    0xd76aa478, 0xe8c7b756, 0x242070db, 0xc1bdceee, 0xf57c0faf, 0x4787c62a, 0xa8304613, 0xfd469501, 0x698098d8, 0x8b44f7af,
    0xffff5bb1, 0x895cd7be, 0x6b901122, 0xfd987193, 0xa679438e, 0x49b40821, 0xf61e2562, 0xc040b340, 0x265e5a51, 0xe9b6c7aa,
    0xd62f105d, 0x02441453, 0xd8a1e681, 0xe7d3fbc8, 0x21e1cde6, 0xc33707d6, 0xf4d50d87, 0x455a14ed, 0xa9e3e905, 0xfcefa3f8,
    0x676f02d9, 0x8d2a4c8a, 0xfffa3942, 0x8771f681, 0x6d9d6122, 0xfde5380c, 0xa4beea44, 0x4bdecfa9, 0xf6bb4b60, 0xbebfbc70,
    0x289b7ec6, 0xeaa127fa, 0xd4ef3085, 0x04881d05, 0xd9d4d039, 0xe6db99e5, 0x1fa27cf8, 0xc4ac5665, 0xf4292244, 0x432aff97,
    0xab9423a7, 0xfc93a039, 0x655b59c3, 0x8f0ccc92, 0xffeff47d, 0x85845dd1, 0x6fa87e4f, 0xfe2ce6e0, 0xa3014314, 0x4e0811a1,
    0xf7537e82, 0xbd3af235, 0x2ad7d2bb, 0xeb86d391,
};

/* `b` is known last, so as little as possible follows it. */
#define F1(b, c, d) ((d) ^ ((b) & ((c) ^ (d))))
#define F2(b, c, d) (((c) & ~(d)) | ((d) & (b)))
#define F3(b, c, d) ((b) ^ ((c) ^ (d)))
#define F4(b, c, d) ((c) ^ ((b) | ~(d)))

/* Step i takes the word (i * times + plus) mod 16 of each set. */
#define STEP(f, a, b, c, d, times, plus, i, shift) \
    for (int set = 0; set < sets; set++) { \
        a[set] += words[((i) * (times) + (plus)) % 16][set] + SINES[i]; \
        a[set] += f(b[set], c[set], d[set]); \
        a[set] = b[set] + (a[set] << shift | a[set] >> (32 - shift)); \
    }
#define FOUR(f, times, plus, i, s1, s2, s3, s4) \
    STEP(f, a, b, c, d, times, plus, i, s1) \
    STEP(f, d, a, b, c, times, plus, i + 1, s2) \
    STEP(f, c, d, a, b, times, plus, i + 2, s3) \
    STEP(f, b, c, d, a, times, plus, i + 3, s4)
#define ROUND(f, times, plus, i, s1, s2, s3, s4) \
    FOUR(f, times, plus, i, s1, s2, s3, s4) \
    FOUR(f, times, plus, i + 4, s1, s2, s3, s4) \
    FOUR(f, times, plus, i + 8, s1, s2, s3, s4) \
    FOUR(f, times, plus, i + 12, s1, s2, s3, s4)

static uint32_t read_word(const unsigned char *at)
{
    return at[0] | at[1] << 8 | at[2] << 16 | (uint32_t)at[3] << 24;
}

#define LANE(lane) read_word(blocks[LANES * set + lane] + 4 * word)

/* Add one block of each lane to its state. */
INLINE void add_blocks(Words state[4][MOST_SETS], const unsigned char *const *blocks, int sets)
{
    Words words[BLOCK_WORDS][MOST_SETS], a[MOST_SETS], b[MOST_SETS], c[MOST_SETS], d[MOST_SETS];
    for (int word = 0; word < BLOCK_WORDS; word++) {
        for (int set = 0; set < sets; set++) {
            /* At once: to load a vector that was stored word by word takes much longer. */
            words[word][set] = (Words){LANE(0), LANE(1), LANE(2), LANE(3), LANE(4), LANE(5), LANE(6), LANE(7)};
        }
    }
    for (int set = 0; set < sets; set++) {
        a[set] = state[0][set];
        b[set] = state[1][set];
        c[set] = state[2][set];
        d[set] = state[3][set];
    }
    ROUND(F1, 1, 0, 0, 7, 12, 17, 22)
    ROUND(F2, 5, 1, 16, 5, 9, 14, 20)
    ROUND(F3, 3, 5, 32, 4, 11, 16, 23)
    ROUND(F4, 7, 0, 48, 6, 10, 15, 21)
    for (int set = 0; set < sets; set++) {
        state[0][set] += a[set];
        state[1][set] += b[set];
        state[2][set] += c[set];
        state[3][set] += d[set];
    }
}

static void write_word(unsigned char *at, uint32_t word)
{
    for (int byte = 0; byte < 4; byte++) at[byte] = (unsigned char)(word >> 8 * byte);
}

static void begin(Lane *lane, Md5Message *message)
{
    size_t rest = message->size % BLOCK_BYTES, tail_bytes = rest < LENGTH_AT ? BLOCK_BYTES : 2 * BLOCK_BYTES;
    uint64_t bits = (uint64_t)message->size * 8;
    lane->message = message;
    lane->at = message->bytes;
    lane->whole = message->size / BLOCK_BYTES;
    lane->left = lane->whole + tail_bytes / BLOCK_BYTES;
    memset(lane->tail, 0, BLOCK_BYTES);
    if (tail_bytes > BLOCK_BYTES) memset(lane->tail + BLOCK_BYTES, 0, BLOCK_BYTES);
    memcpy(lane->tail, message->bytes + message->size - rest, rest);
    lane->tail[rest] = 0x80;
    lane->tail_end = lane->tail + tail_bytes;
    write_word(lane->tail_end - 8, (uint32_t)bits);
    write_word(lane->tail_end - 4, (uint32_t)(bits >> 32));
}

static const unsigned char *next_block(Lane *lane)
{
    lane->left--;
    if (lane->whole == 0) return lane->tail_end - (lane->left + 1) * BLOCK_BYTES;
    lane->whole--;
    lane->at += BLOCK_BYTES;
    return lane->at - BLOCK_BYTES;
}

INLINE void md5_in_sets(Md5Message *messages, size_t count, int sets)
{
    Lane lanes[LANES * MOST_SETS];
    Words state[4][MOST_SETS];
    const unsigned char *blocks[LANES * MOST_SETS];
    size_t taken = 0, finished = 0;
    for (int lane = 0; lane < LANES * sets; lane++) lanes[lane].message = NULL, lanes[lane].left = 0;
    while (finished < count) {
        for (int lane = 0; lane < LANES * sets; lane++) {
            if (lanes[lane].left == 0 && taken < count) {
                begin(&lanes[lane], &messages[taken++]);
                for (int part = 0; part < 4; part++) state[part][lane / LANES][lane % LANES] = INITIAL[part];
            }
            blocks[lane] = lanes[lane].left == 0 ? IDLE : next_block(&lanes[lane]);
        }
        add_blocks(state, blocks, sets);
        for (int lane = 0; lane < LANES * sets; lane++) {
            if (lanes[lane].message == NULL || lanes[lane].left > 0) continue;
            for (int part = 0; part < 4; part++)
                write_word(lanes[lane].message->digest + 4 * part, state[part][lane / LANES][lane % LANES]);
            lanes[lane].message = NULL;
            finished++;
        }
    }
}

#ifdef __x86_64__
#define MD5_WITH(name, features) \
    __attribute__((target(features))) static void name(Md5Message *messages, size_t count) \
    { \
        if (count > 2 * LANES) md5_in_sets(messages, count, MOST_SETS); \
        else md5_in_sets(messages, count, 2); \
    }
MD5_WITH(md5_with_avx2, "avx2")
MD5_WITH(md5_with_avx512, "avx2,avx512f,avx512vl")
#endif

/* Write the digest of each message. */
static void md5_of_each(Md5Message *messages, size_t count)
{
#ifdef __x86_64__
    if (count > LANES && __builtin_cpu_supports("avx512vl")) md5_with_avx512(messages, count);
    else if (count > LANES && __builtin_cpu_supports("avx2")) md5_with_avx2(messages, count);
    else
#endif
    md5_in_sets(messages, count, 1);
}
