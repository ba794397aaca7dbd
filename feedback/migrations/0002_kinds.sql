-- All kinds of feedback (feedback/events.py), on a response, a comparison, a session, or two responses side by side.
-- The views of 0001 are made anew: they name the columns that change.

drop view derived_preferences;
drop view comparison_votes;
drop view current_votes;

alter table feedback
    drop column target,
    add column session_id text,
    add column responses jsonb,              -- two response ids
    add column name text,                    -- a score's metric, a signal's act
    add column lowest double precision,
    add column highest double precision,
    add column text text;
alter table feedback
    add column target text not null generated always as (
        coalesce(
            response_id,
            comparison_id,
            'session:' || session_id,
            least((responses ->> 0) collate "C", responses ->> 1) || ':' ||
            greatest((responses ->> 0) collate "C", responses ->> 1)
        )
    ) stored,
    add column subject text not null generated always as (kind || coalesce(':' || name, '')) stored;

create index feedback_by_current_vote on feedback (target, subject, rater, "time" desc, event_id desc);
create index feedback_by_first_response on feedback ((responses ->> 0)) where responses is not null;
create index feedback_by_second_response on feedback ((responses ->> 1)) where responses is not null;
create index interactions_by_prompt on interactions (prompt_hash);
create index interactions_by_session on interactions (session_id) where session_id is not null;

-- A changed mind is a revision: the latest vote of a rater on a target, by (time, event id), is the current one.
-- Two metrics, or two acts, are two subjects: they don't revise each other.
create view current_votes as
select distinct on (target, subject, rater) *
from feedback
order by target, subject, rater, "time" desc, event_id desc;

-- Current preference votes on comparisons whose two answers have both arrived. a and b are the answers shown at
-- positions 0 and 1. A vote that chooses a response of another comparison joins nothing (the audit counts it).
create view comparison_votes as
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
    vote."time" as voted_at
from current_votes vote
join interactions a on a.comparison_id = vote.comparison_id and a.position = 0
join interactions b on b.comparison_id = vote.comparison_id and b.position = 1
where vote.kind = 'preference'
  and (vote.chosen is null or vote.chosen in (a.response_id, b.response_id));

-- A comparison shows one answer at each place.
create unique index interactions_by_place on interactions (comparison_id, position) where comparison_id is not null;
