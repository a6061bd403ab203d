"""The life of one turn: read the request, plan it against its session, dispatch, relay, settle."""
