-- Who asked to be forgotten, as a digest (feedback/erasure.py), and the ids of what was erased: neither says anything
-- about the person, and both keep out what arrives late or again.
create table erasures (
    erasure_id bigint generated always as identity primary key,
    subject text not null,
    requested_at timestamptz not null default now()
);
create index erasures_by_subject on erasures (subject, requested_at);

create table erased_events (
    event_id text primary key,
    erased_at timestamptz not null default clock_timestamp()
);
create index erased_events_by_time on erased_events (erased_at);

-- Whose words or votes a snapshot holds.
create table snapshot_subjects (
    snapshot_id text not null references snapshots,
    subject text not null,
    primary key (subject, snapshot_id)
);

create index interactions_by_user on interactions ("user") where "user" is not null;
create index feedback_by_rater on feedback (rater);
create index preferences_by_rater on preferences (rater);
create index preferences_by_other_rater on preferences (other_rater);
