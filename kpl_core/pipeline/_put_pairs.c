/* Many user records at a time, in C: the functions of open_record.py, which documents them.

   Memory is slower than the work, so what comes next is fetched early, and the hash keys of several records are computed
   side by side. Then no table of partition keys is needed: a look-up in one costs more. */

enum { DIGITS = 8, LIMBS = 4, LIMB_DIGITS = 9 };

/* A pair may have an explicit hash key as a third item. */
static int is_pair(PyObject *item)
{
    return PyTuple_CheckExact(item) && (PyTuple_GET_SIZE(item) == 2 || PyTuple_GET_SIZE(item) == 3);
}

/* Write an explicit hash key as a digest. Returns 0 unless it is a canonical decimal below 2**128. */
static int read_hash_key(PyObject *text, unsigned char *digest)
{
    uint32_t limbs[LIMBS] = {0}; /* the lowest first */
    if (!PyUnicode_CheckExact(text) || !PyUnicode_IS_ASCII(text)) return 0;
    const Py_UCS1 *digits = PyUnicode_1BYTE_DATA(text);
    Py_ssize_t count = PyUnicode_GET_LENGTH(text);
    if (count == 0 || count > HASH_KEY_CHARACTERS || (count > 1 && digits[0] == '0')) return 0;
    /* As many digits as a limb can hold are one step. */
    for (Py_ssize_t at = 0; at < count;) {
        uint64_t carry = 0, factor = 1;
        do {
            if (digits[at] < '0' || digits[at] > '9') return 0;
            carry = 10 * carry + digits[at++] - '0';
            factor *= 10;
        } while ((count - at) % LIMB_DIGITS != 0);
        for (int limb = 0; limb < LIMBS; limb++, carry >>= 32) {
            carry += factor * limbs[limb];
            limbs[limb] = (uint32_t)carry;
        }
        if (carry != 0) return 0;
    }
    for (int byte = 0; byte < DIGEST_BYTES; byte++) digest[DIGEST_BYTES - 1 - byte] = (unsigned char)(limbs[byte / 4] >> 8 * (byte % 4));
    return 1;
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

/* Read a valid key and bytes, and write the digest of the explicit hash key, if that is not None. Returns 0 if they are
   something else. */
static int read_record(PyObject *key, PyObject *data, PyObject *explicit, Pair *pair)
{
    pair->data = data;
    pair->explicit = (Key){0};
    if (!PyUnicode_CheckExact(key) || !PyBytes_CheckExact(data)) return 0;
    if (PyUnicode_GET_LENGTH(key) == 0 || PyUnicode_GET_LENGTH(key) > MOST_CHARACTERS) return 0;
    pair->key = (Key){key, pair->entry, write_entry(pair->entry, KEY_TAG, key)};
    if (pair->key.entry_bytes < 0) return 0;
    pair->size = PyBytes_GET_SIZE(data) + pair->key.entry_bytes - entry_head(pair->entry);
    if (explicit == Py_None) return 1;
    if (!read_hash_key(explicit, pair->digest)) return 0;
    pair->explicit = (Key){explicit, pair->explicit_entry, write_entry(pair->explicit_entry, EXPLICIT_TAG, explicit)};
    return 1;
}

/* Read a pair. Returns 0 if it is something else. */
static int read_pair(PyObject *item, Pair *pair)
{
    if (!is_pair(item) || (PyTuple_GET_SIZE(item) == 3 && PyTuple_GET_ITEM(item, 2) == Py_None)) return 0;
    PyObject *explicit = PyTuple_GET_SIZE(item) == 2 ? Py_None : PyTuple_GET_ITEM(item, 2);
    return read_record(PyTuple_GET_ITEM(item, 0), PyTuple_GET_ITEM(item, 1), explicit, pair);
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

/* Find the open record of each pair's shard, and fetch what an append will read first, and where it will write. */
static void find_records(Pair *pairs, Py_ssize_t count, const ShardTable *table)
{
    for (Pair *pair = pairs; pair < pairs + count; pair++) {
        PyObject *item = PyList_GET_ITEM(table->records, table->shards == 1 ? 0 : shard_of(pair->digest, table));
        pair->record = Py_IS_TYPE(item, &OpenRecordType) ? (OpenRecord *)item : NULL;
        if (pair->record == NULL) continue;
        const KeyTable *keys = &pair->record->keys;
        if (keys->room > 0) __builtin_prefetch(&keys->slots[(size_t)PyObject_Hash(pair->key.text) & (size_t)(keys->room - 1)]);
        __builtin_prefetch(pair->record->records.bytes + pair->record->records.used, 1);
    }
}

/* Find the open records of up to BLOCK pairs. Their partition keys are hashed for that, unless there is one shard; an explicit
   hash key has its digest. */
static void hash_and_find(Pair *pairs, Py_ssize_t count, const ShardTable *table)
{
    Md5Message messages[BLOCK];
    size_t keys = 0;
    for (Pair *pair = pairs; pair < pairs + count; pair++) {
        Py_ssize_t head = entry_head(pair->entry);
        if (pair->explicit.text != NULL) continue;
        messages[keys++] = (Md5Message){(unsigned char *)pair->entry + head, (size_t)(pair->key.entry_bytes - head), pair->digest};
    }
    if (table->shards > 1) md5_of_each(messages, keys);
    find_records(pairs, count, table);
}

/* Read the next pairs, hash their keys and find their records. Returns how many there are. */
static Py_ssize_t read_block(PyObject *pairs, Py_ssize_t position, Py_ssize_t end, const ShardTable *table, Pair *block)
{
    Py_ssize_t count = 0;
    for (; count < BLOCK && position + count < end; count++) {
        fetch_ahead(pairs, position + count, end);
        if (!read_pair(PyList_GET_ITEM(pairs, position + count), &block[count])) break;
    }
    hash_and_find(block, count, table);
    return count;
}

/* Where the number of each pair's outcome and its index in it are written. Without handles there is no list. */
typedef struct {
    PyObject *outcomes;
    Py_buffer places;
} Places;

static void close_places(Places *places)
{
    PyBuffer_Release(&places->places);
    Py_CLEAR(places->outcomes);
}

/* Return 0 with an error if the handles have no place for each pair before `end`. */
static int open_places(PyObject *handles, Py_ssize_t end, Places *places)
{
    *places = (Places){0};
    if (handles == Py_None) return 1;
    places->outcomes = PyObject_GetAttrString(handles, "outcomes");
    PyObject *array = places->outcomes == NULL ? NULL : PyObject_GetAttrString(handles, "places");
    int are_open = array != NULL && require(PyList_CheckExact(places->outcomes), "outcomes in a list") &&
                   PyObject_GetBuffer(array, &places->places, PyBUF_WRITABLE) == 0 &&
                   require(places->places.len >= 2 * end * (Py_ssize_t)sizeof(uint32_t), "a place for each pair");
    Py_XDECREF(array);
    if (!are_open) close_places(places);
    return are_open;
}

/* Write the outcome of the user record that was appended last. Returns -1 with an error. */
static int write_place(OpenRecord *record, Places *places, Py_ssize_t position)
{
    PyObject *outcomes = places->outcomes;
    Py_ssize_t count = PyList_GET_SIZE(outcomes);
    if (record->number >= count || PyList_GET_ITEM(outcomes, record->number) != record->outcome) {
        if (PyList_Append(outcomes, record->outcome) < 0) return -1;
        record->number = (uint32_t)count;
    }
    uint32_t *place = (uint32_t *)places->places.buf + 2 * position;
    place[0] = record->number;
    place[1] = (uint32_t)PyList_GET_SIZE(record->arrivals) - 1;
    return 1;
}

/* Append a pair to the open record of its shard. The result is that of `append_one`; 0 without one. */
static int append_pair(const Pair *pair, PyObject *now)
{
    if (pair->record == NULL) return 0;
    return append_one(pair->record, pair->key, pair->explicit, pair->data, pair->size, now);
}

/* Append pairs from *position on, which moves, as long as they need no more than that. -1: error. */
static int append_all(PyObject *pairs, Py_ssize_t *position, Py_ssize_t end, const ShardTable *table, Py_ssize_t free_bytes,
                      PyObject *now, Places *places, Py_ssize_t *taken)
{
    Pair block[BLOCK];
    for (Py_ssize_t count = BLOCK, each; count == BLOCK;) {
        count = read_block(pairs, *position, end, table, block);
        for (each = 0; each < count; each++) {
            if (block[each].size > free_bytes - *taken) return 0;
            int appended = append_pair(&block[each], now);
            if (appended > 0 && places->outcomes != NULL) appended = write_place(block[each].record, places, *position);
            if (appended <= 0) return appended;
            *taken += block[each].size;
            ++*position;
        }
    }
    return 0;
}

/* Read the table of a router: the last hash keys of the shards, and their open records. Returns 0 with an error. */
static int read_table(PyObject *given, ShardTable *table)
{
    PyObject *ends, *records;
    if (!PyArg_ParseTuple(given, "SO!", &ends, &PyList_Type, &records)) return 0;
    *table = (ShardTable){(unsigned char *)PyBytes_AS_STRING(ends), records, PyList_GET_SIZE(records)};
    return require(PyBytes_GET_SIZE(ends) == DIGEST_BYTES * table->shards && table->shards > 0, "an end for each shard");
}

static PyObject *append_pairs(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    PyObject *pairs, *router, *now, *handles;
    Py_ssize_t position, end, free_records, free_bytes, taken = 0;
    Places places;
    if (!PyArg_ParseTuple(arguments, "O!(nn)O(nn)OO", &PyList_Type, &pairs, &position, &end, &router, &free_records,
                          &free_bytes, &now, &handles)) return NULL;
    if (end > PyList_GET_SIZE(pairs)) end = PyList_GET_SIZE(pairs);
    if (!require(position >= 0, "an index of 0 or more") || !open_places(handles, end, &places)) return NULL;
    if (free_records < end - position) end = position + free_records;
    PyObject *table = PyObject_GetAttrString(router, "table");
    if (table != NULL && table != Py_None) {
        ShardTable shards;
        if (!read_table(table, &shards) || append_all(pairs, &position, end, &shards, free_bytes, now, &places, &taken) < 0)
            Py_CLEAR(table);
    }
    close_places(&places);
    if (table == NULL) return NULL;
    Py_DECREF(table);
    return Py_BuildValue("(nn)", position, taken);
}

static PyObject *plain_until(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    PyObject *records;
    Py_ssize_t position, parts, most, taken = 0;
    unsigned char digest[DIGEST_BYTES];
    if (!PyArg_ParseTuple(arguments, "O!nnn", &PyList_Type, &records, &position, &parts, &most)) return NULL;
    if (!require(position >= 0, "an index of 0 or more")) return NULL;
    Py_ssize_t end = PyList_GET_SIZE(records);
    for (; position < end; position++) {
        PyObject *pair = PyList_GET_ITEM(records, position);
        fetch_ahead(records, position, end);
        if (!is_pair(pair) || PyTuple_GET_SIZE(pair) != parts) break;
        PyObject *key = PyTuple_GET_ITEM(pair, 0), *data = PyTuple_GET_ITEM(pair, 1);
        if (!PyUnicode_CheckExact(key) || !PyBytes_CheckExact(data) || !PyUnicode_IS_ASCII(key)) break;
        Py_ssize_t length = PyUnicode_GET_LENGTH(key), size = length + PyBytes_GET_SIZE(data);
        if (length == 0 || length > MOST_CHARACTERS || size > most) break;
        if (parts == 3 && !read_hash_key(PyTuple_GET_ITEM(pair, 2), digest)) break;
        taken += size;
    }
    return Py_BuildValue("(nn)", position, taken);
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
