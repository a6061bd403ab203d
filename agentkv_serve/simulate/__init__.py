"""A fleet before it is bought: a discrete-event simulation from measured service times."""
