/* Many user records at a time, in C: the functions of open_record.py, which documents them.

   Memory is slower than the work, so what comes next is fetched early, and the hash keys of several records are computed
   side by side. Then no table of partition keys is needed: a look-up in one costs more. */

#include "_open_record.h"

/* So many records are read and hashed before the first of them is appended. */
enum { BLOCK = 8, DIGITS = 8, ENVELOPE_BYTES = 20, KEY_TAG = 0x0a, MOST_CHARACTERS = 256, CACHE_LINE = 64 };

typedef struct {
    PyObject *data;
    Key key;
    Py_ssize_t size; /* bytes of key and data */
    unsigned char digest[DIGEST_BYTES];
    char entry[LONGEST_ENTRY];
} Pair;

/* The last hash keys of a stream's shards in order, as digests, and the open records of their lanes. */
typedef struct {
    const unsigned char *ends;
    PyObject *records;
    Py_ssize_t shards;
} ShardTable;

static int is_pair(PyObject *item)
{
    return PyTuple_CheckExact(item) && PyTuple_GET_SIZE(item) == 2;
}

/* Fetch what will be read some records later: a pair, and the key and data of an earlier one. */
static void fetch_ahead(PyObject *pairs, Py_ssize_t position, Py_ssize_t end)
{
    if (position + 2 * BLOCK < end) __builtin_prefetch(PyList_GET_ITEM(pairs, position + 2 * BLOCK));
    if (position + BLOCK >= end) return;
    PyObject *pair = PyList_GET_ITEM(pairs, position + BLOCK);
    if (!is_pair(pair)) return;
    const char *key = (const char *)PyTuple_GET_ITEM(pair, 0), *data = (const char *)PyTuple_GET_ITEM(pair, 1);
    __builtin_prefetch(key);
    __builtin_prefetch(data);
    __builtin_prefetch(data + CACHE_LINE);
}

/* Read a pair of a valid key and bytes. Returns 0 if it is something else. */
static int read_pair(PyObject *item, Pair *pair)
{
    if (!is_pair(item)) return 0;
    PyObject *key = PyTuple_GET_ITEM(item, 0);
    pair->data = PyTuple_GET_ITEM(item, 1);
    if (!PyUnicode_CheckExact(key) || !PyBytes_CheckExact(pair->data)) return 0;
    if (PyUnicode_GET_LENGTH(key) == 0 || PyUnicode_GET_LENGTH(key) > MOST_CHARACTERS) return 0;
    pair->key = (Key){key, pair->entry, write_entry(pair->entry, KEY_TAG, key)};
    if (pair->key.entry_bytes < 0) return 0;
    pair->size = PyBytes_GET_SIZE(pair->data) + pair->key.entry_bytes - entry_head(pair->entry);
    return 1;
}

static uint64_t big_endian(const unsigned char *at)
{
    uint64_t number = 0;
    for (int byte = 0; byte < DIGITS; byte++) number = number << 8 | at[byte];
    return number;
}

/* Return which shard holds a hash key: the first whose end is not below it. */
static Py_ssize_t shard_of(const unsigned char *digest, const ShardTable *table)
{
    uint64_t high = big_endian(digest), low = big_endian(digest + DIGITS);
    Py_ssize_t first = 0;
    for (Py_ssize_t left = table->shards, half; left > 1; left -= half) {
        half = left / 2;
        const unsigned char *end = table->ends + DIGEST_BYTES * (first + half - 1);
        uint64_t end_high = big_endian(end), end_low = big_endian(end + DIGITS);
        /* Without a branch: no processor can predict it. */
        first += half * ((end_high < high) | ((end_high == high) & (end_low < low)));
    }
    return first;
}

/* Read the next pairs and hash their keys, unless there is one shard. Returns how many there are. */
static Py_ssize_t read_block(PyObject *pairs, Py_ssize_t position, Py_ssize_t end, const ShardTable *table, Pair *block)
{
    Md5Message messages[BLOCK];
    Py_ssize_t count = 0;
    for (; count < BLOCK && position + count < end; count++) {
        Pair *pair = &block[count];
        fetch_ahead(pairs, position + count, end);
        if (!read_pair(PyList_GET_ITEM(pairs, position + count), pair)) break;
        Py_ssize_t head = entry_head(pair->entry);
        messages[count] = (Md5Message){(unsigned char *)pair->entry + head, (size_t)(pair->key.entry_bytes - head), pair->digest};
    }
    if (table->shards > 1) md5_of_each(messages, (size_t)count);
    return count;
}

/* Append a pair to the open record of its shard, and write its outcome and its index in it.
   The result is that of `append_one`, or 0 if there is no such record. */
static int append_pair(const Pair *pair, const ShardTable *table, PyObject *now, PyObject **outcome, uint32_t *index)
{
    PyObject *item = PyList_GET_ITEM(table->records, table->shards == 1 ? 0 : shard_of(pair->digest, table));
    if (!Py_IS_TYPE(item, &OpenRecordType)) return 0;
    OpenRecord *record = (OpenRecord *)item;
    int appended = append_one(record, pair->key, NULL, pair->data, pair->size, now);
    if (appended > 0) {
        Py_XSETREF(*outcome, Py_NewRef(record->outcome));
        *index = (uint32_t)PyList_GET_SIZE(record->arrivals) - 1;
    }
    return appended;
}

/* Append pairs from *position on, which moves, as long as they need no more than that. -1: error. */
static int append_all(PyObject *pairs, Py_ssize_t *position, Py_ssize_t end, const ShardTable *table, Py_ssize_t free_bytes,
                      PyObject *now, PyObject **outcomes, uint32_t *indices, Py_ssize_t *taken)
{
    Pair block[BLOCK];
    for (Py_ssize_t count = BLOCK, each; count == BLOCK;) {
        count = read_block(pairs, *position, end, table, block);
        for (each = 0; each < count; each++) {
            if (block[each].size > free_bytes - *taken) return 0;
            int appended = append_pair(&block[each], table, now, &outcomes[*position], &indices[*position]);
            if (appended <= 0) return appended;
            *taken += block[each].size;
            ++*position;
        }
    }
    return 0;
}

static PyObject *append_pairs(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    PyObject *pairs, *router, *now, *outcomes, *indices, *ends, *records;
    Py_ssize_t position, end, free_records, free_bytes, taken = 0;
    if (!PyArg_ParseTuple(arguments, "O!(nn)O(nn)OO!O", &PyList_Type, &pairs, &position, &end, &router, &free_records,
                          &free_bytes, &now, &PyList_Type, &outcomes, &indices)) return NULL;
    if (end > PyList_GET_SIZE(pairs)) end = PyList_GET_SIZE(pairs);
    if (end > position + free_records) end = position + free_records;
    if (!require(position >= 0, "an index of 0 or more") ||
        !require(PyList_GET_SIZE(outcomes) >= end, "a place for each outcome")) return NULL;
    PyObject *table = PyObject_GetAttrString(router, "table");
    if (table == NULL) return NULL;
    if (table != Py_None) {
        Py_buffer view;
        int failed = !PyArg_ParseTuple(table, "SO!", &ends, &PyList_Type, &records) ||
                     PyObject_GetBuffer(indices, &view, PyBUF_WRITABLE) < 0;
        if (!failed) {
            ShardTable shards = {(unsigned char *)PyBytes_AS_STRING(ends), records, PyList_GET_SIZE(records)};
            failed = !require(view.len >= end * (Py_ssize_t)sizeof(uint32_t), "a place for each index") ||
                     !require(PyBytes_GET_SIZE(ends) == DIGEST_BYTES * shards.shards && shards.shards > 0, "an end for each shard") ||
                     append_all(pairs, &position, end, &shards, free_bytes, now,
                                ((PyListObject *)outcomes)->ob_item, view.buf, &taken) < 0;
            PyBuffer_Release(&view);
        }
        if (failed) Py_CLEAR(table);
    }
    if (table == NULL) return NULL;
    Py_DECREF(table);
    return Py_BuildValue("(nn)", position, taken);
}

static PyObject *plain_until(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    PyObject *records;
    Py_ssize_t position, most;
    if (!PyArg_ParseTuple(arguments, "O!nn", &PyList_Type, &records, &position, &most)) return NULL;
    if (!require(position >= 0, "an index of 0 or more")) return NULL;
    Py_ssize_t end = PyList_GET_SIZE(records);
    for (; position < end; position++) {
        PyObject *pair = PyList_GET_ITEM(records, position);
        fetch_ahead(records, position, end);
        if (!is_pair(pair)) break;
        PyObject *key = PyTuple_GET_ITEM(pair, 0), *data = PyTuple_GET_ITEM(pair, 1);
        if (!PyUnicode_CheckExact(key) || !PyBytes_CheckExact(data) || !PyUnicode_IS_ASCII(key)) break;
        Py_ssize_t length = PyUnicode_GET_LENGTH(key);
        if (length == 0 || length > MOST_CHARACTERS || length + PyBytes_GET_SIZE(data) > most) break;
    }
    return PyLong_FromSsize_t(position);
}

/* Only the caller has seen these bytes objects, so they can still change. */
static PyObject *sealed(PyObject *Py_UNUSED(module), PyObject *blank)
{
    if (!require(PyList_CheckExact(blank), "a list of aggregated records")) return NULL;
    Py_ssize_t count = PyList_GET_SIZE(blank);
    Md5Message *messages = PyMem_Calloc(count + 1, sizeof(Md5Message));
    if (messages == NULL) return PyErr_NoMemory();
    for (Py_ssize_t each = 0; each < count; each++) {
        PyObject *data = PyList_GET_ITEM(blank, each);
        if (!require(PyBytes_CheckExact(data) && PyBytes_GET_SIZE(data) >= ENVELOPE_BYTES, "bytes with room for a digest")) {
            PyMem_Free(messages);
            return NULL;
        }
        unsigned char *bytes = (unsigned char *)PyBytes_AS_STRING(data);
        size_t size = (size_t)PyBytes_GET_SIZE(data) - ENVELOPE_BYTES;
        messages[each] = (Md5Message){bytes + ENVELOPE_BYTES - DIGEST_BYTES, size, bytes + ENVELOPE_BYTES - DIGEST_BYTES + size};
    }
    md5_of_each(messages, (size_t)count);
    PyMem_Free(messages);
    return Py_NewRef(blank);
}

/* Add a pair to the run of a lane; `explicit_route` is NULL or that of its explicit hash key. -1: error, else 1. */
static int place_in_run(PyObject *pair, PyObject *route, PyObject *explicit_route, Py_ssize_t size, PyObject *runs)
{
    PyObject *lane = PyTuple_GET_ITEM(explicit_route == NULL ? route : explicit_route, 0);
    PyObject *run = PyDict_GetItemWithError(runs, lane);
    if (run == NULL) {
        if (PyErr_Occurred() || (run = PyList_New(0)) == NULL) return -1;
        int failed = PyDict_SetItem(runs, lane, run);
        Py_DECREF(run);
        if (failed) return -1;
    }
    if (!require(PyList_CheckExact(run), "runs that are lists")) return -1;
    PyObject *key = PyTuple_GET_ITEM(pair, 0), *entry = PyTuple_GET_ITEM(route, 1), *data = PyTuple_GET_ITEM(pair, 1);
    PyObject *number = PyLong_FromSsize_t(size), *placed = NULL;
    if (number != NULL)
        placed = explicit_route == NULL ? PyTuple_Pack(4, key, entry, data, number)
                                        : PyTuple_Pack(6, key, entry, data, number, PyTuple_GET_ITEM(pair, 2),
                                                       PyTuple_GET_ITEM(explicit_route, 1));
    int failed = placed == NULL || PyList_Append(run, placed);
    Py_XDECREF(number);
    Py_XDECREF(placed);
    return failed ? -1 : 1;
}

/* Try to add one pair to the run of its lane. The result is that of put_pair. The routes are owned meanwhile: a garbage
   collection may run code that empties the tables. */
static int place_pair(PyObject *pair, Py_ssize_t parts, PyObject *routes, PyObject *explicit_routes, Py_ssize_t most,
                      PyObject *runs, Py_ssize_t *size)
{
    if (!PyTuple_CheckExact(pair) || PyTuple_GET_SIZE(pair) != parts || parts < 2 || parts > 3) return 0;
    PyObject *key = PyTuple_GET_ITEM(pair, 0), *data = PyTuple_GET_ITEM(pair, 1), *explicit_route = NULL;
    if (!PyUnicode_CheckExact(key) || !PyBytes_CheckExact(data)) return 0;
    PyObject *route = PyDict_GetItemWithError(routes, key);
    if (route == NULL) return PyErr_Occurred() ? -1 : 0;
    if (!require(PyTuple_CheckExact(route) && PyTuple_GET_SIZE(route) == 4, "routes of four parts")) return -1;
    Py_ssize_t key_bytes = PyLong_AsSsize_t(PyTuple_GET_ITEM(route, 2));
    if (key_bytes == -1 && PyErr_Occurred()) return -1;
    *size = key_bytes + PyBytes_GET_SIZE(data);
    if (*size > most) return 0;
    if (PyTuple_GET_SIZE(pair) == 3) {
        PyObject *explicit = PyTuple_GET_ITEM(pair, 2);
        if (PyTuple_GET_ITEM(route, 3) == Py_None || !PyUnicode_CheckExact(explicit)) return 0;
        explicit_route = PyDict_GetItemWithError(explicit_routes, explicit);
        if (explicit_route == NULL) return PyErr_Occurred() ? -1 : 0;
        if (!require(PyTuple_CheckExact(explicit_route) && PyTuple_GET_SIZE(explicit_route) == 2, "routes of two parts")) return -1;
    }
    Py_INCREF(pair);
    Py_INCREF(route);
    Py_XINCREF(explicit_route);
    int done = place_in_run(pair, route, explicit_route, *size, runs);
    Py_DECREF(pair);
    Py_DECREF(route);
    Py_XDECREF(explicit_route);
    return done;
}

static PyObject *place_pairs(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    PyObject *pairs, *routes, *explicit_routes, *runs;
    Py_ssize_t position, most, taken = 0, size = 0, parts = 0;
    if (!PyArg_ParseTuple(arguments, "O!nO!O!nO!", &PyList_Type, &pairs, &position, &PyDict_Type, &routes, &PyDict_Type,
                          &explicit_routes, &most, &PyDict_Type, &runs)) return NULL;
    if (!require(position >= 0, "an index of 0 or more")) return NULL;
    if (PyList_GET_SIZE(pairs) > 0 && PyTuple_CheckExact(PyList_GET_ITEM(pairs, 0))) {
        parts = PyTuple_GET_SIZE(PyList_GET_ITEM(pairs, 0));
    }
    for (; position < PyList_GET_SIZE(pairs); position++) {
        int done = place_pair(PyList_GET_ITEM(pairs, position), parts, routes, explicit_routes, most, runs, &size);
        if (done < 0) return NULL;
        if (done == 0) break;
        taken += size;
    }
    return Py_BuildValue("(nn)", position, taken);
}

PyMethodDef pair_functions[] = {
    {"append_pairs", append_pairs, METH_VARARGS, NULL},
    {"fork_count", fork_count, METH_NOARGS, NULL},
    {"forked", forked, METH_NOARGS, NULL},
    {"place_pairs", place_pairs, METH_VARARGS, NULL},
    {"plain_until", plain_until, METH_VARARGS, NULL},
    {"sealed", sealed, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};
