/* What the C files of the open aggregated record share. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

/* LONGEST_ENTRY: the entry of 256 characters of four bytes. */
enum { DIGEST_BYTES = 16, LONGEST_ENTRY = 3 + 4 * 256 };

typedef struct {
    char *bytes;
    Py_ssize_t used, room;
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
    Py_ssize_t room, count; /* `room` is 0 or a power of two */
    Buffer entries;
} KeyTable;

typedef struct {
    PyObject_HEAD
    PyObject *delivery; /* the class of a delivery: called with the outcome and the index */
    PyObject *outcome;
    PyObject *arrivals;   /* list of float */
    PyObject *first_data; /* the data of the first user record, or NULL */
    KeyTable keys, explicit_keys;
    Buffer records; /* the protobuf of the user records */
    Py_ssize_t limit, size, user_bytes;
} OpenRecord;

/* A partition key or explicit hash key, and its entry. */
typedef struct {
    PyObject *text;
    const char *entry;
    Py_ssize_t entry_bytes;
} Key;

typedef struct {
    const unsigned char *bytes;
    size_t size;
    unsigned char *digest; /* DIGEST_BYTES, written by `md5_of_each` */
} Md5Message;

extern PyTypeObject OpenRecordType, RoomType, PutMethodType;
extern PyMethodDef pair_functions[];

int begin_put_one(void);
PyObject *fork_count(PyObject *module, PyObject *ignored);
PyObject *forked(PyObject *module, PyObject *ignored);
PyObject *last_delivery(OpenRecord *self);
/* Append a user record of at most so many bytes to the open record of its shard in a router's table. Returns that record,
   and the bytes of key and data; NULL if nothing was appended, which is an error if one is set. */
OpenRecord *append_routed(PyObject *table, PyObject *text, PyObject *data, Py_ssize_t most, PyObject *now, Py_ssize_t *size);
int require(int is_right, const char *what);
int append_one(OpenRecord *self, Key key, const Key *explicit, PyObject *data, Py_ssize_t user_bytes, PyObject *now);
Py_ssize_t entry_head(const char *entry);
Py_ssize_t write_entry(char *entry, int tag, PyObject *text);
void md5_of_each(Md5Message *messages, size_t count);
