-- A dead letter that was sent again. If it still can't be read it becomes another one, at its new place in the log.
alter table dead_letters add column replayed_at timestamptz;
