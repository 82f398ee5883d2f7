"""Pure decisions of admission: no sockets, no clock, no tasks."""
