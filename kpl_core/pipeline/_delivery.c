/* Deliveries in C: how they are made, and how one whose result is known is awaited. The slots of deliveries and outcomes are
   read and written where they are in memory, because a call in Python for each record takes longer than all else. */

/* Aggregated records seldom have more user records. Python itself keeps the integers up to 256. */
enum { KNOWN_INDICES = 1024 };

static PyObject *known_indices[KNOWN_INDICES];

static int require(int is_right, const char *what)
{
    if (!is_right) PyErr_Format(PyExc_TypeError, "the open record takes %s", what);
    return is_right;
}

/* Return where the instances of a class have a slot that refers to an object, or 0. */
static Py_ssize_t slot_offset(PyObject *type, const char *name)
{
    PyObject *member = PyType_Check(type) ? PyObject_GetAttrString(type, name) : NULL;
    Py_ssize_t offset = 0;
    if (member != NULL && Py_IS_TYPE(member, &PyMemberDescr_Type)) {
        PyMemberDescrObject *slot = (PyMemberDescrObject *)member;
        if (slot->d_member->type == T_OBJECT_EX && PyType_IsSubtype((PyTypeObject *)type, slot->d_common.d_type))
            offset = slot->d_member->offset;
    }
    PyErr_Clear();
    Py_XDECREF(member);
    return offset;
}

static PyObject **slot_at(PyObject *object, Py_ssize_t offset)
{
    return (PyObject **)((char *)object + offset);
}

/* Read where a delivery has its slots. Returns 0 with an error if it has others, or is tracked by the garbage collector. */
static int read_class(PyObject *type, DeliveryClass *class)
{
    *class = (DeliveryClass){NULL, slot_offset(type, "outcome"), slot_offset(type, "index")};
    if (!require(class->outcome_at > 0 && class->index_at > 0 && !PyType_IS_GC((PyTypeObject *)type) &&
                 ((PyTypeObject *)type)->tp_basicsize == sizeof(PyObject) + 2 * sizeof(PyObject *),
                 "deliveries of an outcome and an index")) return 0;
    class->type = (PyTypeObject *)Py_NewRef(type);
    return 1;
}

static PyObject *index_object(Py_ssize_t index)
{
    if (index >= KNOWN_INDICES) return PyLong_FromSsize_t(index);
    if (known_indices[index] == NULL) known_indices[index] = PyLong_FromSsize_t(index);
    return Py_XNewRef(known_indices[index]);
}

/* Give a delivery an outcome and an index. Returns -1 with an error. */
static int set_delivery(const DeliveryClass *class, PyObject *delivery, PyObject *outcome, Py_ssize_t index)
{
    PyObject *number = index_object(index);
    if (number == NULL) return -1;
    Py_XSETREF(*slot_at(delivery, class->outcome_at), Py_NewRef(outcome));
    Py_XSETREF(*slot_at(delivery, class->index_at), number);
    return 0;
}

/* Return a delivery of the user record with this index in the outcome. */
static PyObject *new_delivery(const DeliveryClass *class, PyObject *outcome, Py_ssize_t index)
{
    PyObject *number = index_object(index), *delivery = number == NULL ? NULL : PyObject_New(PyObject, class->type);
    if (delivery == NULL) { Py_XDECREF(number); return NULL; }
    *slot_at(delivery, class->outcome_at) = Py_NewRef(outcome);
    *slot_at(delivery, class->index_at) = number;
    return delivery;
}

/* What an `await` of something known asks for its value: neither a tuple nor an exception. */
typedef struct {
    PyObject_HEAD
    PyObject *value; /* NULL once it was given */
} Known;

static PySendResult give(Known *self, PyObject *Py_UNUSED(sent), PyObject **value)
{
    *value = self->value;
    self->value = NULL;
    if (*value != NULL) return PYGEN_RETURN;
    PyErr_SetString(PyExc_RuntimeError, "cannot reuse an awaited value");
    return PYGEN_ERROR;
}

static PyObject *raise_value(Known *self)
{
    PyObject *value;
    if (give(self, NULL, &value) == PYGEN_ERROR) return NULL;
    PyErr_SetObject(PyExc_StopIteration, value);
    Py_DECREF(value);
    return NULL;
}

static void deallocate_known(Known *self)
{
    Py_XDECREF(self->value);
    PyObject_Free(self);
}

static PyAsyncMethods known_async = {.am_send = (sendfunc)give};

/* Not tracked by the garbage collector: it lives as long as an `await`. */
static PyTypeObject KnownType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "kpl_core.pipeline._open_record.Known",
    .tp_doc = "An awaitable whose value is known.",
    .tp_basicsize = sizeof(Known),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .tp_dealloc = (destructor)deallocate_known,
    .tp_as_async = &known_async,
    .tp_iter = PyObject_SelfIter,
    .tp_iternext = (iternextfunc)raise_value,
};

/* The classes whose slots are known: that of outcomes, and that of the deliveries that were awaited last. */
static struct {
    PyTypeObject *type;
    Py_ssize_t settled_at, moved_at, shared_at;
} outcomes;
static DeliveryClass deliveries;

/* Return the result of a delivery (borrowed), or NULL: it is not known, or only the version in Python finds it. */
static PyObject *shared_result(PyObject *delivery)
{
    PyObject *outcome = Py_IS_TYPE(delivery, deliveries.type) ? *slot_at(delivery, deliveries.outcome_at) : NULL;
    if (outcome == NULL || !Py_IS_TYPE(outcome, outcomes.type)) return NULL;
    if (*slot_at(outcome, outcomes.settled_at) != Py_True || *slot_at(outcome, outcomes.moved_at) != Py_None) return NULL;
    PyObject *result = *slot_at(outcome, outcomes.shared_at);
    return result == Py_None ? NULL : result;
}

static PyObject *call_await(PyObject *callable, PyObject *const *given, size_t flags, PyObject *names)
{
    if (PyVectorcall_NARGS(flags) == 1 && names == NULL) {
        DeliveryClass class;
        if (!Py_IS_TYPE(given[0], deliveries.type) && read_class((PyObject *)Py_TYPE(given[0]), &class)) {
            Py_XDECREF(deliveries.type);
            deliveries = class;
        } else PyErr_Clear();
        PyObject *result = shared_result(given[0]);
        Known *known = result == NULL ? NULL : PyObject_New(Known, &KnownType);
        if (known != NULL) known->value = Py_NewRef(result);
        if (result != NULL) return (PyObject *)known;
    }
    return PyObject_Vectorcall(((PutMethod *)callable)->function, given, flags, names);
}

static PyObject *use_outcomes(PyObject *Py_UNUSED(module), PyObject *type)
{
    Py_ssize_t settled = slot_offset(type, "settled"), moved = slot_offset(type, "moved");
    Py_ssize_t shared = slot_offset(type, "shared_result");
    if (!require(settled > 0 && moved > 0 && shared > 0, "outcomes with slots")) return NULL;
    Py_XSETREF(outcomes.type, (PyTypeObject *)Py_NewRef(type));
    outcomes.settled_at = settled;
    outcomes.moved_at = moved;
    outcomes.shared_at = shared;
    Py_RETURN_NONE;
}
