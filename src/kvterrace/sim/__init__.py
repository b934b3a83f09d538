"""The production ledger on a virtual clock, without bytes: for replay, planning and tests."""
