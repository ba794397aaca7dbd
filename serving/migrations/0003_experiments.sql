-- Experiments with any number of arms, a share of the traffic, and namespaces in which they don't overlap.

-- Who owns which stretch of the line on which units fall (serving/assignment.py): [[end, experiment_id or null], …].
create table experiment_namespaces (
    namespace text primary key,
    unit text not null check (unit in ('user', 'session', 'response')),
    allocation jsonb not null
);

-- The first arm is the control. weight: of the units in the experiment.
create table experiment_arms (
    experiment_id text not null references experiments,
    position smallint not null,
    name text not null,
    checkpoint_id text not null references checkpoints,
    weight double precision not null check (weight >= 0 and weight <= 1),
    primary key (experiment_id, position),
    unique (experiment_id, name)
);

-- What was done to each experiment, and when.
create table experiment_changes (
    change_id bigint generated always as identity primary key,
    experiment_id text not null references experiments,
    kind text not null check (kind in ('started', 'ramped', 'stopped')),
    detail jsonb not null,
    changed_at timestamptz not null default now()
);
create index experiment_changes_by_experiment on experiment_changes (experiment_id);

alter table experiments
    add column namespace text,
    add column share double precision not null default 1 check (share >= 0 and share <= 1),
    add column allocation jsonb,             -- of the arms, by their names, as above
    add column plan jsonb not null default '{}';

-- Reports for the API: asked for by a gateway, made by a controller. begun_at: what was stored by then is in it.
create table experiment_reports (
    experiment_id text primary key references experiments,
    wanted_at timestamptz not null,
    begun_at timestamptz,
    report jsonb
);

insert into experiment_arms (experiment_id, position, name, checkpoint_id, weight)
select experiment_id, 0, 'control', control_id, 1 - candidate_weight from experiments
union all
select experiment_id, 1, 'candidate', candidate_id, candidate_weight from experiments;

update experiments set namespace = alias, allocation = case
    when floor(candidate_weight * 9007199254740992) <= 0 then '[[9007199254740992, "control"]]'::jsonb
    when candidate_weight >= 1 then '[[9007199254740992, "candidate"]]'::jsonb
    else jsonb_build_array(
        jsonb_build_array(floor(candidate_weight * 9007199254740992)::bigint, 'candidate'),
        jsonb_build_array(9007199254740992, 'control')
    )
end;
insert into experiment_namespaces (namespace, unit, allocation)
select namespace, 'user', jsonb_build_array(jsonb_build_array(9007199254740992, experiment_id))
from experiments where state = 'running';

drop index one_running_experiment_per_alias;
alter table experiments
    drop column control_id,
    drop column candidate_id,
    drop column candidate_weight,
    alter column namespace set not null,
    alter column allocation set not null;
