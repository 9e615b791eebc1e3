"""Jobs that go on without processes that are lost, and with others in their place."""
