"""Calls of `Model` that go on with other processes in an elastic job."""
