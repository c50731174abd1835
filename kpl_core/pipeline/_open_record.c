/* The open aggregated record in C: what open_record.py does, a put at a time and many at a time.

   The user records are written into one buffer in the KPL's protobuf, instead of being kept in pieces. open_record.py
   documents each function and is the reference: tests compare the two. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum { ENVELOPE_BYTES = 20, SHUT = -1, LONGEST_HEAD = 48 };

typedef struct {
    PyObject_HEAD
    PyObject *delivery;    /* the class of a delivery: called with the outcome and the index */
    PyObject *outcome;
    PyObject *arrivals;    /* list of float */
    PyObject *key_indices; /* dict: partition key -> int */
    PyObject *key_entries; /* list of bytes */
    PyObject *explicit_indices; /* the same of explicit hash keys */
    PyObject *explicit_entries;
    PyObject *last_data;   /* the data of the last user record, or NULL */
    Py_ssize_t limit, size, user_bytes;
    char *records;         /* the protobuf of the user records */
    Py_ssize_t used, room;
} OpenRecord;

static char *put_varint(char *at, uint64_t number)
{
    for (; number >= 0x80; number >>= 7) *at++ = (char)(number | 0x80);
    *at++ = (char)number;
    return at;
}

static Py_ssize_t varint_bytes(uint64_t number)
{
    Py_ssize_t count = 1;
    for (; number >= 0x80; number >>= 7) count++;
    return count;
}

/* Write what precedes the data of a user record: its tag and length, its key index, the index of its explicit hash key
   unless that is -1, the tag and length of the data. */
static Py_ssize_t put_head(char *head, Py_ssize_t index, Py_ssize_t explicit_index, Py_ssize_t data_bytes)
{
    char *at = head;
    Py_ssize_t explicit_bytes = explicit_index < 0 ? 0 : 1 + varint_bytes(explicit_index);
    *at++ = 0x1a;
    at = put_varint(at, (uint64_t)(1 + varint_bytes(index) + explicit_bytes + 1 + varint_bytes(data_bytes) + data_bytes));
    *at++ = 0x08;
    at = put_varint(at, (uint64_t)index);
    if (explicit_index >= 0) {
        *at++ = 0x10;
        at = put_varint(at, (uint64_t)explicit_index);
    }
    *at++ = 0x1a;
    return put_varint(at, (uint64_t)data_bytes) - head;
}

static int write_bytes(OpenRecord *self, const char *head, Py_ssize_t head_bytes, PyObject *data)
{
    Py_ssize_t data_bytes = PyBytes_GET_SIZE(data), needed = self->used + head_bytes + data_bytes;
    if (needed > self->room) {
        Py_ssize_t room = needed + needed / 2 + 1024;
        char *grown = PyMem_Realloc(self->records, room);
        if (grown == NULL) { PyErr_NoMemory(); return -1; }
        self->records = grown;
        self->room = room;
    }
    memcpy(self->records + self->used, head, head_bytes);
    memcpy(self->records + self->used + head_bytes, PyBytes_AS_STRING(data), data_bytes);
    self->used = needed;
    Py_INCREF(data);
    Py_XSETREF(self->last_data, data);
    return 0;
}

/* Return the index of a key in one of the two tables; *is_new says whether it has to be added. -1: error. */
static Py_ssize_t index_of(PyObject *indices, PyObject *entries, PyObject *key, int *is_new)
{
    PyObject *found = PyDict_GetItemWithError(indices, key);
    *is_new = found == NULL;
    if (found != NULL) return PyLong_AsSsize_t(found);
    return PyErr_Occurred() ? -1 : PyList_GET_SIZE(entries);
}

static int add_key(PyObject *indices, PyObject *entries, PyObject *key, PyObject *entry)
{
    PyObject *number = PyLong_FromSsize_t(PyList_GET_SIZE(entries));
    int failed = number == NULL || PyDict_SetItem(indices, key, number);
    if (!failed && PyList_Append(entries, entry)) {
        failed = 1;
        PyDict_DelItem(indices, key);
    }
    Py_XDECREF(number);
    return failed ? -1 : 0;
}

/* Append a user record; `explicit` is its explicit hash key or NULL, then that one's entry.
   1: appended; 0: it would not stay below the limit, and nothing changed; -1: error. */
static int append_one(OpenRecord *self, PyObject *key, PyObject *entry, PyObject *explicit, PyObject *explicit_entry,
                      PyObject *data, Py_ssize_t user_bytes, PyObject *now)
{
    char head[LONGEST_HEAD];
    int is_new, is_new_explicit = 0;
    Py_ssize_t explicit_index = -1;
    if (self->limit == SHUT) return 0;
    Py_ssize_t index = index_of(self->key_indices, self->key_entries, key, &is_new);
    if (index < 0) return -1;
    if (explicit != NULL) {
        explicit_index = index_of(self->explicit_indices, self->explicit_entries, explicit, &is_new_explicit);
        if (explicit_index < 0) return -1;
    }
    Py_ssize_t head_bytes = put_head(head, index, explicit_index, PyBytes_GET_SIZE(data));
    Py_ssize_t size = self->size + head_bytes + PyBytes_GET_SIZE(data) + (is_new ? PyBytes_GET_SIZE(entry) : 0) +
                      (is_new_explicit ? PyBytes_GET_SIZE(explicit_entry) : 0);
    if (size >= self->limit) return 0;
    if (is_new && add_key(self->key_indices, self->key_entries, key, entry)) return -1;
    if (is_new_explicit && add_key(self->explicit_indices, self->explicit_entries, explicit, explicit_entry)) return -1;
    if (write_bytes(self, head, head_bytes, data) || PyList_Append(self->arrivals, now)) return -1;
    self->size = size;
    self->user_bytes += user_bytes;
    return 1;
}

/* Return the delivery of the user record that was appended last. */
static PyObject *last_delivery(OpenRecord *self)
{
    PyObject *index = PyLong_FromSsize_t(PyList_GET_SIZE(self->arrivals) - 1);
    if (index == NULL) return NULL;
    PyObject *arguments[] = {NULL, self->outcome, index};
    PyObject *delivery = PyObject_Vectorcall(self->delivery, arguments + 1, 2 | PY_VECTORCALL_ARGUMENTS_OFFSET, NULL);
    Py_DECREF(index);
    return delivery;
}

static int require(int is_right, const char *what)
{
    if (!is_right) PyErr_Format(PyExc_TypeError, "the open record takes %s", what);
    return is_right;
}

static PyObject *append(OpenRecord *self, PyObject *const *given, Py_ssize_t count)
{
    if (!require(count == 5 && PyBytes_CheckExact(given[1]) && PyBytes_CheckExact(given[2]),
                 "a partition key, its entry, data, their bytes and a time")) return NULL;
    Py_ssize_t user_bytes = PyLong_AsSsize_t(given[3]);
    if (user_bytes == -1 && PyErr_Occurred()) return NULL;
    int appended = append_one(self, given[0], given[1], NULL, NULL, given[2], user_bytes, given[4]);
    if (appended < 0) return NULL;
    if (appended == 0) Py_RETURN_NONE;
    return last_delivery(self);
}

static PyObject *append_run(OpenRecord *self, PyObject *const *given, Py_ssize_t count)
{
    if (!require(count == 3 && PyList_CheckExact(given[0]), "a list of user records, an index and a time")) return NULL;
    Py_ssize_t position = PyLong_AsSsize_t(given[1]);
    if (position == -1 && PyErr_Occurred()) return NULL;
    if (!require(position >= 0, "an index of 0 or more")) return NULL;
    for (; position < PyList_GET_SIZE(given[0]); position++) {
        PyObject *placed = PyList_GET_ITEM(given[0], position);
        int is_explicit = PyTuple_CheckExact(placed) && PyTuple_GET_SIZE(placed) == 6;
        if (!require(PyTuple_CheckExact(placed) && (is_explicit || PyTuple_GET_SIZE(placed) == 4) &&
                     PyBytes_CheckExact(PyTuple_GET_ITEM(placed, 1)) && PyBytes_CheckExact(PyTuple_GET_ITEM(placed, 2)) &&
                     (!is_explicit || PyBytes_CheckExact(PyTuple_GET_ITEM(placed, 5))),
                     "runs of (key, entry, data, bytes), or with an explicit hash key and its entry")) return NULL;
        Py_ssize_t user_bytes = PyLong_AsSsize_t(PyTuple_GET_ITEM(placed, 3));
        if (user_bytes == -1 && PyErr_Occurred()) return NULL;
        PyObject *explicit = is_explicit ? PyTuple_GET_ITEM(placed, 4) : NULL;
        PyObject *explicit_entry = is_explicit ? PyTuple_GET_ITEM(placed, 5) : NULL;
        int appended = append_one(self, PyTuple_GET_ITEM(placed, 0), PyTuple_GET_ITEM(placed, 1), explicit, explicit_entry,
                                  PyTuple_GET_ITEM(placed, 2), user_bytes, given[2]);
        if (appended < 0) return NULL;
        if (appended == 0) break;
    }
    return PyLong_FromSsize_t(position);
}

static PyObject *add(OpenRecord *self, PyObject *const *given, Py_ssize_t count)
{
    int is_new;
    if (!require(count == 6 && PyBytes_CheckExact(given[1]) && PyBytes_CheckExact(given[2]) && PyBytes_CheckExact(given[3]),
                 "a partition key, its entry, the head, data, their bytes and a time")) return NULL;
    Py_ssize_t user_bytes = PyLong_AsSsize_t(given[4]);
    if (user_bytes == -1 && PyErr_Occurred()) return NULL;
    Py_ssize_t index = index_of(self->key_indices, self->key_entries, given[0], &is_new);
    if (index < 0 || (is_new && add_key(self->key_indices, self->key_entries, given[0], given[1]))) return NULL;
    if (write_bytes(self, PyBytes_AS_STRING(given[2]), PyBytes_GET_SIZE(given[2]), given[3])) return NULL;
    if (PyList_Append(self->arrivals, given[5])) return NULL;
    self->user_bytes += user_bytes;
    return last_delivery(self);
}

static PyObject *add_explicit(OpenRecord *self, PyObject *const *given, Py_ssize_t count)
{
    if (!require(count == 2 && PyBytes_CheckExact(given[1]), "an explicit hash key and its entry")) return NULL;
    if (add_key(self->explicit_indices, self->explicit_entries, given[0], given[1])) return NULL;
    Py_RETURN_NONE;
}

static PyObject *restart(OpenRecord *self, PyObject *outcome)
{
    PyObject *arrivals = PyList_New(0), *indices = PyDict_New(), *entries = PyList_New(0);
    PyObject *explicit_indices = PyDict_New(), *explicit_entries = PyList_New(0);
    if (arrivals == NULL || indices == NULL || entries == NULL || explicit_indices == NULL || explicit_entries == NULL) {
        Py_XDECREF(arrivals); Py_XDECREF(indices); Py_XDECREF(entries);
        Py_XDECREF(explicit_indices); Py_XDECREF(explicit_entries);
        return NULL;
    }
    Py_INCREF(outcome);
    Py_XSETREF(self->outcome, outcome);
    Py_XSETREF(self->arrivals, arrivals);
    Py_XSETREF(self->key_indices, indices);
    Py_XSETREF(self->key_entries, entries);
    Py_XSETREF(self->explicit_indices, explicit_indices);
    Py_XSETREF(self->explicit_entries, explicit_entries);
    Py_CLEAR(self->last_data);
    PyMem_Free(self->records); /* an idle lane keeps no buffer */
    self->records = NULL;
    self->used = self->room = self->user_bytes = 0;
    self->limit = SHUT;
    self->size = ENVELOPE_BYTES;
    Py_RETURN_NONE;
}

static PyObject *key_index(OpenRecord *self, PyObject *key)
{
    PyObject *found = PyDict_GetItemWithError(self->key_indices, key);
    if (found == NULL && PyErr_Occurred()) return NULL;
    return Py_NewRef(found == NULL ? Py_None : found);
}

static PyObject *explicit_index(OpenRecord *self, PyObject *explicit)
{
    PyObject *found = PyDict_GetItemWithError(self->explicit_indices, explicit);
    if (found == NULL && PyErr_Occurred()) return NULL;
    return Py_NewRef(found == NULL ? Py_None : found);
}

static PyObject *first_key(OpenRecord *self, PyObject *Py_UNUSED(ignored))
{
    PyObject *key, *value;
    Py_ssize_t position = 0;
    if (PyDict_Next(self->key_indices, &position, &key, &value)) return Py_NewRef(key);
    PyErr_SetNone(PyExc_StopIteration);
    return NULL;
}

static PyObject *joined(PyObject *entries)
{
    PyObject *empty = PyBytes_FromStringAndSize(NULL, 0);
    PyObject *table = empty == NULL ? NULL : PyObject_CallMethod(empty, "join", "O", entries);
    Py_XDECREF(empty);
    return table;
}

static PyObject *key_table(OpenRecord *self, PyObject *Py_UNUSED(ignored))
{
    return joined(self->key_entries);
}

static PyObject *explicit_table(OpenRecord *self, PyObject *Py_UNUSED(ignored))
{
    return joined(self->explicit_entries);
}

static PyObject *only_data(OpenRecord *self, PyObject *Py_UNUSED(ignored))
{
    if (self->last_data != NULL) return Py_NewRef(self->last_data);
    PyErr_SetString(PyExc_IndexError, "the record is empty");
    return NULL;
}

static PyObject *records(OpenRecord *self, PyObject *Py_UNUSED(ignored))
{
    return PyBytes_FromStringAndSize(self->records, self->used);
}

static PyObject *key_count(OpenRecord *self, void *Py_UNUSED(closure))
{
    return PyLong_FromSsize_t(PyList_GET_SIZE(self->key_entries));
}

static PyObject *explicit_count(OpenRecord *self, void *Py_UNUSED(closure))
{
    return PyLong_FromSsize_t(PyList_GET_SIZE(self->explicit_entries));
}

static PyMethodDef methods[] = {
    {"append", (PyCFunction)(void (*)(void))append, METH_FASTCALL, NULL},
    {"append_run", (PyCFunction)(void (*)(void))append_run, METH_FASTCALL, NULL},
    {"add", (PyCFunction)(void (*)(void))add, METH_FASTCALL, NULL},
    {"add_explicit", (PyCFunction)(void (*)(void))add_explicit, METH_FASTCALL, NULL},
    {"restart", (PyCFunction)restart, METH_O, NULL},
    {"key_index", (PyCFunction)key_index, METH_O, NULL},
    {"explicit_index", (PyCFunction)explicit_index, METH_O, NULL},
    {"first_key", (PyCFunction)first_key, METH_NOARGS, NULL},
    {"key_table", (PyCFunction)key_table, METH_NOARGS, NULL},
    {"explicit_table", (PyCFunction)explicit_table, METH_NOARGS, NULL},
    {"only_data", (PyCFunction)only_data, METH_NOARGS, NULL},
    {"records", (PyCFunction)records, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef members[] = {
    {"outcome", T_OBJECT_EX, offsetof(OpenRecord, outcome), READONLY, NULL},
    {"arrivals", T_OBJECT_EX, offsetof(OpenRecord, arrivals), READONLY, NULL},
    {"limit", T_PYSSIZET, offsetof(OpenRecord, limit), 0, NULL},
    {"size", T_PYSSIZET, offsetof(OpenRecord, size), 0, NULL},
    {"user_bytes", T_PYSSIZET, offsetof(OpenRecord, user_bytes), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyGetSetDef properties[] = {
    {"key_count", (getter)key_count, NULL, NULL, NULL},
    {"explicit_count", (getter)explicit_count, NULL, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyObject *new_record(PyTypeObject *type, PyObject *arguments, PyObject *Py_UNUSED(keywords))
{
    PyObject *delivery;
    if (!PyArg_ParseTuple(arguments, "O", &delivery)) return NULL;
    OpenRecord *self = (OpenRecord *)type->tp_alloc(type, 0);
    if (self == NULL) return NULL;
    self->delivery = Py_NewRef(delivery);
    PyObject *restarted = restart(self, Py_None);
    if (restarted == NULL) { Py_DECREF(self); return NULL; }
    Py_DECREF(restarted);
    return (PyObject *)self;
}

static void deallocate(OpenRecord *self)
{
    Py_XDECREF(self->delivery);
    Py_XDECREF(self->outcome);
    Py_XDECREF(self->arrivals);
    Py_XDECREF(self->key_indices);
    Py_XDECREF(self->key_entries);
    Py_XDECREF(self->explicit_indices);
    Py_XDECREF(self->explicit_entries);
    Py_XDECREF(self->last_data);
    PyMem_Free(self->records);
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
    .tp_getset = properties,
};

/* Try to put one pair. 1: done, and *size is the bytes of key and data; 0: it needs more than an append; -1: error. */
static int put_pair(PyObject *pair, PyObject *routes, Py_ssize_t free_bytes, PyObject *now, PyObject *deliveries, Py_ssize_t *size)
{
    if (!PyTuple_CheckExact(pair) || PyTuple_GET_SIZE(pair) != 2) return 0;
    PyObject *key = PyTuple_GET_ITEM(pair, 0), *data = PyTuple_GET_ITEM(pair, 1);
    if (!PyUnicode_CheckExact(key) || !PyBytes_CheckExact(data)) return 0;
    PyObject *route = PyDict_GetItemWithError(routes, key);
    if (route == NULL) return PyErr_Occurred() ? -1 : 0;
    if (!require(PyTuple_CheckExact(route) && PyTuple_GET_SIZE(route) == 4, "routes of four parts")) return -1;
    PyObject *entry = PyTuple_GET_ITEM(route, 1), *record = PyTuple_GET_ITEM(route, 3);
    if (!Py_IS_TYPE(record, &OpenRecordType)) return 0;
    Py_ssize_t key_bytes = PyLong_AsSsize_t(PyTuple_GET_ITEM(route, 2));
    if (key_bytes == -1 && PyErr_Occurred()) return -1;
    *size = key_bytes + PyBytes_GET_SIZE(data);
    if (*size > free_bytes) return 0;
    if (!require(PyBytes_CheckExact(entry), "entries of bytes")) return -1;
    int appended = append_one((OpenRecord *)record, key, entry, NULL, NULL, data, *size, now);
    if (appended <= 0) return appended;
    PyObject *delivery = last_delivery((OpenRecord *)record);
    if (delivery == NULL) return -1;
    int failed = PyList_Append(deliveries, delivery);
    Py_DECREF(delivery);
    return failed ? -1 : 1;
}

static PyObject *append_pairs(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    PyObject *pairs, *routes, *now, *deliveries;
    Py_ssize_t position, free_records, free_bytes, taken = 0, size = 0;
    if (!PyArg_ParseTuple(arguments, "O!nO!(nn)OO!", &PyList_Type, &pairs, &position, &PyDict_Type, &routes, &free_records,
                          &free_bytes, &now, &PyList_Type, &deliveries)) return NULL;
    if (!require(position >= 0, "an index of 0 or more")) return NULL;
    for (; position < PyList_GET_SIZE(pairs) && free_records > 0; position++, free_records--) {
        int done = put_pair(PyList_GET_ITEM(pairs, position), routes, free_bytes - taken, now, deliveries, &size);
        if (done < 0) return NULL;
        if (done == 0) break;
        taken += size;
    }
    return Py_BuildValue("(nn)", position, taken);
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
static int place_pair(PyObject *pair, PyObject *routes, PyObject *explicit_routes, Py_ssize_t most, PyObject *runs, Py_ssize_t *size)
{
    if (!PyTuple_CheckExact(pair) || PyTuple_GET_SIZE(pair) < 2 || PyTuple_GET_SIZE(pair) > 3) return 0;
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
    Py_ssize_t position, most, taken = 0, size = 0;
    if (!PyArg_ParseTuple(arguments, "O!nO!O!nO!", &PyList_Type, &pairs, &position, &PyDict_Type, &routes, &PyDict_Type,
                          &explicit_routes, &most, &PyDict_Type, &runs)) return NULL;
    if (!require(position >= 0, "an index of 0 or more")) return NULL;
    for (; position < PyList_GET_SIZE(pairs); position++) {
        int done = place_pair(PyList_GET_ITEM(pairs, position), routes, explicit_routes, most, runs, &size);
        if (done < 0) return NULL;
        if (done == 0) break;
        taken += size;
    }
    return Py_BuildValue("(nn)", position, taken);
}

static PyMethodDef functions[] = {
    {"append_pairs", append_pairs, METH_VARARGS, NULL},
    {"place_pairs", place_pairs, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, .m_name = "_open_record", .m_doc = "open_record.py in C.", .m_size = -1, .m_methods = functions};

PyMODINIT_FUNC PyInit__open_record(void)
{
    if (PyType_Ready(&OpenRecordType) < 0) return NULL;
    PyObject *module = PyModule_Create(&definition);
    if (module == NULL) return NULL;
    if (PyModule_AddObjectRef(module, "OpenRecord", (PyObject *)&OpenRecordType) < 0) Py_CLEAR(module);
    return module;
}
