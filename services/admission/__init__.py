"""Admission: who may use the device now."""
