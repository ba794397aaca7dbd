-- One turn of the wheel each; `context` holds what the steps hand on (snapshot, reward model, checkpoint, experiment).
create table rounds (
    round_id text primary key,
    number integer not null unique,
    state text not null,
    context jsonb not null default '{}',
    created_at timestamptz not null default now(),
    updated_at timestamptz not null default now()
);

create table round_transitions (
    round_id text not null references rounds,
    ordinal integer not null,
    from_state text not null,
    to_state text not null,
    reason text not null,
    report jsonb not null,
    moved_at timestamptz not null default now(),
    primary key (round_id, ordinal)
);

create table controller_lease (
    name text primary key,
    holder text not null,
    expires_at timestamptz not null
);
