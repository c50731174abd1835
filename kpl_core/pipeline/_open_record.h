/* What the C files of the open aggregated record share. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <structmember.h>
#include <time.h>

enum { DIGEST_BYTES = 16, ENVELOPE_BYTES = 20, KEY_TAG = 0x0a, EXPLICIT_TAG = 0x12, HASH_KEY_CHARACTERS = 39, CACHE_LINE = 64 };

/* LONGEST_ENTRY: the entry of so many characters of four bytes. */
enum { MOST_CHARACTERS = 256, LONGEST_ENTRY = 3 + 4 * MOST_CHARACTERS };

/* So many records are read and hashed before the first of them is appended; and so many puts, or bytes, are a full batch. */
enum { BLOCK = 32, BATCH = 128, BATCH_BYTES = 65536 };

/* It begins with the room that it needed the last time. */
typedef struct {
    char *bytes;
    Py_ssize_t used, room, first_room;
} Buffer;

/* A table of partition keys, or of explicit hash keys: their entries in the protobuf, and an index by hash, with open
   addressing. A key is known by its entry, so no key object is owned. */
typedef struct {
    uint32_t hash;
    uint32_t number; /* 1 + the index of the key; 0: this slot is free */
    Py_ssize_t offset; /* of its entry */
} Slot;

typedef struct {
    Slot *slots;
    Py_ssize_t room, count, first_room; /* `room` is 0 or a power of two */
    Buffer entries;
} KeyTable;

/* The class of a delivery, and where its outcome and index are in memory. */
typedef struct {
    PyTypeObject *type;
    Py_ssize_t outcome_at, index_at;
} DeliveryClass;

typedef struct {
    PyObject_HEAD
    DeliveryClass delivery;
    PyObject *outcome;
    PyObject *arrivals;   /* list of float */
    PyObject *first_key, *first_data; /* of the first user record, or NULL */
    KeyTable keys, explicit_keys;
    Buffer records; /* the protobuf of the user records */
    Py_ssize_t limit, size, user_bytes;
    uint32_t number; /* of the outcome in the handles of the last run, perhaps */
} OpenRecord;

/* A partition key or explicit hash key, and its entry. */
typedef struct {
    PyObject *text;
    const char *entry;
    Py_ssize_t entry_bytes;
} Key;

/* A user record that is about to be appended. */
typedef struct {
    PyObject *data;
    OpenRecord *record; /* of its shard, or NULL */
    Key key, explicit; /* without an explicit hash key its text is NULL */
    Py_ssize_t size; /* bytes of key and data */
    unsigned char digest[DIGEST_BYTES]; /* of the hash key */
    char entry[LONGEST_ENTRY], explicit_entry[HASH_KEY_CHARACTERS + 3];
} Pair;

/* The last hash keys of a stream's shards in order, as digests, and the open records of their lanes. */
typedef struct {
    const unsigned char *ends;
    PyObject *records;
    Py_ssize_t shards;
} ShardTable;

/* What is free for normal user records: the base of `BufferLimit`, whose numbers Python code changes too. */
typedef struct {
    PyObject_HEAD
    Py_ssize_t free_records, free_bytes;
} Room;

typedef struct {
    PyObject *key, *data, *explicit, *flow, *delivery; /* without an explicit hash key, or a flow, that is None */
} BatchedPut;

/* open_record.py documents the arguments and members. */
typedef struct {
    PyObject_HEAD
    PyObject *pipeline, *router;
    Room *room, *taken; /* the same, or in the inbox of threads: below zero, what that takes of the room */
    DeliveryClass delivery;
    Py_ssize_t most, limit;
    double opens_at;
    int64_t step; /* of the coarse clock, at the last reading of the clock */
    PyObject *outcome, *now; /* of the records that wait */
    Py_ssize_t count, bytes, drains; /* that run: a hook may put in one */
    char takes_flows, passes; /* no record waits for the turn of its flow */
    BatchedPut puts[BATCH];
} PutBatch;

typedef struct {
    const unsigned char *bytes;
    size_t size;
    unsigned char *digest; /* DIGEST_BYTES, written by `md5_of_each` */
} Md5Message;

/* A method in C, and the same in Python, which it calls for what it leaves to that. */
typedef struct {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    PyObject *function;
} PutMethod;
