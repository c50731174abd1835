/* The open aggregated record in C: what open_record.py does.

   The user records are written into one buffer in the KPL's protobuf, instead of being kept in pieces. open_record.py
   documents each function and is the reference: tests compare the two. */

enum { SHUT = -1, LONGEST_HEAD = 80, FIRST_SLOTS = 64 };

static const char MAGIC[4] = {'\xf3', '\x89', '\x9a', '\xc2'};

static char *put_varint(char *at, uint64_t number)
{
    for (; number >= 0x80; number >>= 7) *at++ = (char)(number | 0x80);
    *at++ = (char)number;
    return at;
}

static char *put_field(char *at, char tag, uint64_t number)
{
    *at = tag;
    return put_varint(at + 1, number);
}

/* Write what precedes the data of a user record: its tag and length, its key index, the index of its explicit hash key
   unless that is -1, the tag and length of the data. Returns how many bytes these are. */
static Py_ssize_t put_head(char *head, Py_ssize_t index, Py_ssize_t explicit_index, Py_ssize_t data_bytes)
{
    char fields[LONGEST_HEAD / 2], *end = put_field(fields, 0x08, (uint64_t)index);
    if (explicit_index >= 0) end = put_field(end, 0x10, (uint64_t)explicit_index);
    end = put_field(end, 0x1a, (uint64_t)data_bytes);
    char *at = put_field(head, 0x1a, (uint64_t)(end - fields + data_bytes));
    memcpy(at, fields, sizeof fields); /* a fixed size is copied much faster */
    return at + (end - fields) - head;
}

/* Make room for more bytes: four times as much at a time, up to `most`, which is what will be needed as a rule. */
static int make_room(Buffer *buffer, Py_ssize_t more, Py_ssize_t most)
{
    Py_ssize_t needed = buffer->used + more, room = 4 * needed + 256;
    if (needed <= buffer->room) return 0;
    if (room > most) room = needed <= most ? most : needed + needed / 2;
    if (room < buffer->first_room) room = buffer->first_room;
    char *grown = PyMem_Realloc(buffer->bytes, room);
    if (grown == NULL) { PyErr_NoMemory(); return -1; }
    buffer->bytes = grown;
    buffer->room = room;
    return 0;
}

static void free_buffer(Buffer *buffer)
{
    PyMem_Free(buffer->bytes);
    *buffer = (Buffer){.first_room = 4 * buffer->used < buffer->room ? buffer->used : buffer->room};
}

static void put_bytes(Buffer *buffer, const char *bytes, Py_ssize_t count)
{
    memcpy(buffer->bytes + buffer->used, bytes, count);
    buffer->used += count;
}

/* Write the entry of a key: tag, length, UTF-8. Returns its bytes, or -1: it has too many, or is no Unicode text. */
static Py_ssize_t write_entry(char *entry, int tag, PyObject *text)
{
    Py_ssize_t text_bytes;
    const char *utf8 = PyUnicode_AsUTF8AndSize(text, &text_bytes);
    if (utf8 == NULL || text_bytes > LONGEST_ENTRY - 3) {
        PyErr_Clear();
        return -1;
    }
    entry[0] = (char)tag;
    char *at = put_varint(entry + 1, (uint64_t)text_bytes);
    memcpy(at, utf8, text_bytes);
    return at + text_bytes - entry;
}

/* Return how many bytes precede the text of an entry. */
static Py_ssize_t entry_head(const char *entry)
{
    return (unsigned char)entry[1] < 0x80 ? 2 : 3;
}

/* Return the slot of a key, or the free one where it belongs. The table has slots. */
static Slot *slot_of(const KeyTable *table, Key key, uint32_t hash)
{
    for (size_t at = hash;; at++) {
        Slot *slot = &table->slots[at & (size_t)(table->room - 1)];
        if (slot->number == 0) return slot;
        if (slot->hash == hash && key.entry_bytes <= table->entries.used - slot->offset &&
            memcmp(table->entries.bytes + slot->offset, key.entry, key.entry_bytes) == 0) return slot;
    }
}

/* Return the index of a key, or how many keys there are. */
static Py_ssize_t index_of(const KeyTable *table, Key key)
{
    const Slot *slot = table->room == 0 ? NULL : slot_of(table, key, (uint32_t)PyObject_Hash(key.text));
    return slot == NULL || slot->number == 0 ? table->count : slot->number - 1;
}

/* Make room for one more key. At least half of the slots stay free. */
static int make_key_room(KeyTable *table, Key key)
{
    Py_ssize_t room = table->room > 0 ? 4 * table->room : table->first_room > 0 ? table->first_room : FIRST_SLOTS;
    if (2 * table->count >= table->room) {
        Slot *before = table->slots, *slots = PyMem_Calloc(room, sizeof(Slot));
        if (slots == NULL) { PyErr_NoMemory(); return -1; }
        for (Py_ssize_t number = 0; number < table->room; number++) {
            size_t at = before[number].hash;
            if (before[number].number == 0) continue;
            while (slots[at & (size_t)(room - 1)].number != 0) at++;
            slots[at & (size_t)(room - 1)] = before[number];
        }
        PyMem_Free(before);
        table->slots = slots;
        table->room = room;
    }
    return make_room(&table->entries, key.entry_bytes, 0);
}

/* Add a new key, for which there is room. */
static void add_key(KeyTable *table, Key key)
{
    uint32_t hash = (uint32_t)PyObject_Hash(key.text);
    *slot_of(table, key, hash) = (Slot){hash, (uint32_t)++table->count, table->entries.used};
    put_bytes(&table->entries, key.entry, key.entry_bytes);
}

static void clear_table(KeyTable *table)
{
    PyMem_Free(table->slots);
    free_buffer(&table->entries);
    *table = (KeyTable){.first_room = 8 * table->count < table->room ? FIRST_SLOTS : table->room, .entries = table->entries};
}

/* Append head and data with the time of arrival. `user_bytes` counts key and data. */
static int write_record(OpenRecord *self, Key key, const char *head, Py_ssize_t head_bytes, PyObject *data, Py_ssize_t user_bytes,
                        PyObject *now)
{
    if (make_room(&self->records, head_bytes + PyBytes_GET_SIZE(data), self->limit)) return -1;
    if (PyList_Append(self->arrivals, now)) return -1;
    if (self->records.used == 0) {
        Py_XSETREF(self->first_key, Py_NewRef(key.text));
        Py_XSETREF(self->first_data, Py_NewRef(data));
    }
    put_bytes(&self->records, head, head_bytes);
    put_bytes(&self->records, PyBytes_AS_STRING(data), PyBytes_GET_SIZE(data));
    self->user_bytes += user_bytes;
    return 0;
}

/* Append a user record; without an explicit hash key the text of that is NULL.
   1: appended; 0: it would not stay below the limit, and nothing changed; -1: error. */
static int append_one(OpenRecord *self, Key key, Key explicit, PyObject *data, Py_ssize_t user_bytes, PyObject *now)
{
    char head[LONGEST_HEAD];
    Py_ssize_t index = index_of(&self->keys, key), explicit_index = -1, data_bytes = PyBytes_GET_SIZE(data);
    int is_new = index == self->keys.count, is_new_explicit = 0;
    if (explicit.text != NULL) {
        explicit_index = index_of(&self->explicit_keys, explicit);
        is_new_explicit = explicit_index == self->explicit_keys.count;
    }
    Py_ssize_t head_bytes = put_head(head, index, explicit_index, data_bytes);
    Py_ssize_t size = self->size + head_bytes + data_bytes + (is_new ? key.entry_bytes : 0) +
                      (is_new_explicit ? explicit.entry_bytes : 0);
    if (size >= self->limit) return 0;
    if (is_new && make_key_room(&self->keys, key)) return -1;
    if (is_new_explicit && make_key_room(&self->explicit_keys, explicit)) return -1;
    if (write_record(self, key, head, head_bytes, data, user_bytes, now)) return -1;
    if (is_new) add_key(&self->keys, key);
    if (is_new_explicit) add_key(&self->explicit_keys, explicit);
    self->size = size;
    return 1;
}

/* Return the delivery of the user record that was appended last. */
static PyObject *last_delivery(OpenRecord *self)
{
    return new_delivery(&self->delivery, self->outcome, PyList_GET_SIZE(self->arrivals) - 1);
}

/* Read a key and its entry. Returns 0 if they are something else. */
static int read_key(PyObject *text, PyObject *entry, Key *key)
{
    if (!PyUnicode_Check(text) || !PyBytes_CheckExact(entry)) return 0;
    *key = (Key){text, PyBytes_AS_STRING(entry), PyBytes_GET_SIZE(entry)};
    return 1;
}

static PyObject *append(OpenRecord *self, PyObject *const *given, Py_ssize_t count)
{
    Key key;
    if (!require(count == 5 && read_key(given[0], given[1], &key) && PyBytes_CheckExact(given[2]),
                 "a partition key, its entry, data, their bytes and a time")) return NULL;
    Py_ssize_t user_bytes = PyLong_AsSsize_t(given[3]);
    if (user_bytes == -1 && PyErr_Occurred()) return NULL;
    int appended = append_one(self, key, (Key){0}, given[2], user_bytes, given[4]);
    if (appended < 0) return NULL;
    if (appended == 0) Py_RETURN_NONE;
    return last_delivery(self);
}

static PyObject *add(OpenRecord *self, PyObject *const *given, Py_ssize_t count)
{
    Key key, explicit = {0};
    if (!require((count == 6 || (count == 8 && read_key(given[6], given[7], &explicit))) && read_key(given[0], given[1], &key) &&
                 PyBytes_CheckExact(given[2]) && PyBytes_CheckExact(given[3]),
                 "a partition key, its entry, the head, data, their bytes, a time, and perhaps a new explicit hash key and its entry"))
        return NULL;
    Py_ssize_t user_bytes = PyLong_AsSsize_t(given[4]), head_bytes = PyBytes_GET_SIZE(given[2]);
    if (user_bytes == -1 && PyErr_Occurred()) return NULL;
    int is_new = index_of(&self->keys, key) == self->keys.count;
    if (is_new && make_key_room(&self->keys, key)) return NULL;
    if (explicit.text != NULL && make_key_room(&self->explicit_keys, explicit)) return NULL;
    if (write_record(self, key, PyBytes_AS_STRING(given[2]), head_bytes, given[3], user_bytes, given[5])) return NULL;
    if (is_new) add_key(&self->keys, key);
    if (explicit.text != NULL) add_key(&self->explicit_keys, explicit);
    return last_delivery(self);
}

/* An idle lane keeps no buffer. */
static void free_buffers(OpenRecord *self)
{
    clear_table(&self->keys);
    clear_table(&self->explicit_keys);
    free_buffer(&self->records);
    Py_CLEAR(self->first_key);
    Py_CLEAR(self->first_data);
}

static PyObject *restart(OpenRecord *self, PyObject *outcome)
{
    PyObject *arrivals = PyList_New(0);
    if (arrivals == NULL) return NULL;
    Py_XSETREF(self->outcome, Py_NewRef(outcome));
    Py_XSETREF(self->arrivals, arrivals);
    free_buffers(self);
    self->user_bytes = 0;
    self->limit = SHUT;
    self->size = ENVELOPE_BYTES;
    Py_RETURN_NONE;
}

static PyObject *index_in(const KeyTable *table, int tag, PyObject *text)
{
    char entry[LONGEST_ENTRY];
    if (!require(PyUnicode_Check(text), "keys that are str")) return NULL;
    Key key = {text, entry, write_entry(entry, tag, text)};
    Py_ssize_t index = key.entry_bytes < 0 ? table->count : index_of(table, key);
    if (index == table->count) Py_RETURN_NONE;
    return PyLong_FromSsize_t(index);
}

static PyObject *key_index(OpenRecord *self, PyObject *key)
{
    return index_in(&self->keys, KEY_TAG, key);
}

static PyObject *explicit_index(OpenRecord *self, PyObject *explicit)
{
    return index_in(&self->explicit_keys, EXPLICIT_TAG, explicit);
}

static PyObject *aggregated(OpenRecord *self, PyObject *Py_UNUSED(ignored))
{
    const Buffer *parts[] = {&self->keys.entries, &self->explicit_keys.entries, &self->records};
    Py_ssize_t size = ENVELOPE_BYTES;
    for (int part = 0; part < 3; part++) size += parts[part]->used;
    PyObject *data = PyBytes_FromStringAndSize(NULL, size);
    if (data == NULL) return NULL;
    char *at = PyBytes_AS_STRING(data);
    memcpy(at, MAGIC, sizeof MAGIC);
    at += sizeof MAGIC;
    for (int part = 0; part < 3; part++) {
        if (parts[part]->used > 0) memcpy(at, parts[part]->bytes, parts[part]->used);
        at += parts[part]->used;
    }
    memset(at, 0, DIGEST_BYTES);
    return data;
}

static PyMethodDef methods[] = {
    {"append", (PyCFunction)(void (*)(void))append, METH_FASTCALL, NULL},
    {"add", (PyCFunction)(void (*)(void))add, METH_FASTCALL, NULL},
    {"restart", (PyCFunction)restart, METH_O, NULL},
    {"key_index", (PyCFunction)key_index, METH_O, NULL},
    {"explicit_index", (PyCFunction)explicit_index, METH_O, NULL},
    {"aggregated", (PyCFunction)aggregated, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef members[] = {
    {"outcome", T_OBJECT_EX, offsetof(OpenRecord, outcome), READONLY, NULL},
    {"arrivals", T_OBJECT_EX, offsetof(OpenRecord, arrivals), READONLY, NULL},
    {"first_key", T_OBJECT_EX, offsetof(OpenRecord, first_key), READONLY, NULL},
    {"only_data", T_OBJECT_EX, offsetof(OpenRecord, first_data), READONLY, NULL},
    {"limit", T_PYSSIZET, offsetof(OpenRecord, limit), 0, NULL},
    {"size", T_PYSSIZET, offsetof(OpenRecord, size), 0, NULL},
    {"key_count", T_PYSSIZET, offsetof(OpenRecord, keys.count), READONLY, NULL},
    {"explicit_count", T_PYSSIZET, offsetof(OpenRecord, explicit_keys.count), READONLY, NULL},
    {"user_bytes", T_PYSSIZET, offsetof(OpenRecord, user_bytes), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyObject *new_record(PyTypeObject *type, PyObject *arguments, PyObject *Py_UNUSED(keywords))
{
    PyObject *delivery;
    if (!PyArg_ParseTuple(arguments, "O", &delivery)) return NULL;
    OpenRecord *self = (OpenRecord *)type->tp_alloc(type, 0);
    if (self == NULL) return NULL;
    PyObject *restarted = read_class(delivery, &self->delivery) ? restart(self, Py_None) : NULL;
    if (restarted == NULL) { Py_DECREF(self); return NULL; }
    Py_DECREF(restarted);
    return (PyObject *)self;
}

static void deallocate(OpenRecord *self)
{
    Py_XDECREF(self->delivery.type);
    Py_XDECREF(self->outcome);
    Py_XDECREF(self->arrivals);
    free_buffers(self);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

/* No support for the garbage collector: nothing that a record refers to refers back to it. */
static PyTypeObject OpenRecordType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "kpl_core.pipeline._open_record.OpenRecord",
    .tp_doc = "The user records of one aggregated record.",
    .tp_basicsize = sizeof(OpenRecord),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = new_record,
    .tp_dealloc = (destructor)deallocate,
    .tp_methods = methods,
    .tp_members = members,
};
