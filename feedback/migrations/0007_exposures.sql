-- What experiments showed to whom. Narrow, for reports read all of an experiment's rows.

alter table interactions
    add column arm text,
    add column fallback boolean not null default false,
    add column exposed_at timestamptz,
    add column shadow_of text;
create index interactions_by_shadowed on interactions (shadow_of) where shadow_of is not null;

-- One row for each answer of which a unit was shown anything while an experiment drew its arm: not what was pinned,
-- forced for a tester, asked for a comparison or in the shadow.
create table exposures (
    experiment_id text not null,
    response_id text not null references interactions (response_id) on delete cascade,
    unit text not null,
    arm text not null,
    propensity double precision not null,
    fallback boolean not null,
    exposed_at timestamptz not null,
    status text not null,
    completion_tokens integer,
    time_to_first_token_s real,
    first_token_bucket smallint generated always as (    -- its logarithm, twenty to each factor of e
        floor(20 * ln(greatest(time_to_first_token_s, 1e-4)::float8))
    ) stored,
    duration_s real not null,
    tags jsonb,
    primary key (response_id)
);
create index exposures_by_unit on exposures (experiment_id, unit, exposed_at) include (arm, propensity);
create index exposures_in_trouble on exposures (experiment_id, arm, unit) include (status)
    where status not in ('completed', 'length');

-- Comparison votes as in 0002, with the arms that wrote the two answers.
create or replace view comparison_votes as
select
    vote.event_id as vote_id,
    vote.comparison_id,
    a.experiment_id,
    vote.rater,
    vote.source,
    vote.verdict,
    a.prompt_hash,
    a.response_id as response_a,
    b.response_id as response_b,
    case vote.chosen when a.response_id then a.response_id when b.response_id then b.response_id end
        as chosen_response_id,
    case vote.chosen when a.response_id then b.response_id when b.response_id then a.response_id end
        as rejected_response_id,
    case vote.chosen when a.response_id then a.checkpoint_id when b.response_id then b.checkpoint_id end
        as chosen_checkpoint_id,
    case vote.chosen when a.response_id then b.checkpoint_id when b.response_id then a.checkpoint_id end
        as rejected_checkpoint_id,
    a.checkpoint_id as checkpoint_a,
    b.checkpoint_id as checkpoint_b,
    vote."time" as voted_at,
    a.arm as arm_a,
    b.arm as arm_b,
    case vote.chosen when a.response_id then a.arm when b.response_id then b.arm end as chosen_arm,
    a.unit
from current_votes vote
join interactions a on a.comparison_id = vote.comparison_id and a.position = 0
join interactions b on b.comparison_id = vote.comparison_id and b.position = 1
where vote.kind = 'preference'
  and (vote.chosen is null or vote.chosen in (a.response_id, b.response_id));
