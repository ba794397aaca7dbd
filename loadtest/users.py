"""Simulated users: they chat and vote through the public API, and know nothing else of the platform.

`collect_votes` compares two answers to a prompt and votes, `chat_and_thumb` uses the official OpenAI client
and sends a thumb, `answers_of` asks pinned checkpoints. A request that fails is retried with the same
idempotency key, so a retry never votes twice; every acknowledged vote is returned, for an audit.
"""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import httpx
from openai import APIError, AsyncOpenAI

from loadtest.raters import Rater, Taste, answer_tokens, conversation

T = TypeVar("T")
PATIENCE_S = 240.0
PAUSE_S = 1.0


@dataclass(frozen=True)
class Sampling:
    """How answers are drawn: tokens at most, and temperature."""

    max_tokens: int
    temperature: float = 0.8


@dataclass
class Acknowledged:
    """What the API promised to keep: ids of feedback and of responses, in the order of arrival."""

    feedback_ids: list[str] = field(default_factory=list)
    response_ids: list[str] = field(default_factory=list)
    retries: int = 0


class Users:
    """A crowd of `count` raters on one API. Use as an asynchronous context manager.

    base_url: such as http://127.0.0.1:8000; key: an API key with the scopes inference and feedback;
    taste: what the raters like; concurrency: requests under way at most.
    """

    def __init__(
        self,
        base_url: str,
        key: str,
        *,
        taste: Taste,
        seed: int,
        count: int = 200,
        concurrency: int = 16,
        sampling: Sampling | None = None,
        timeout_s: float = 120.0,
    ) -> None:
        self.taste: Taste = taste
        self.sampling = sampling or Sampling(max_tokens=answer_tokens(taste))
        self.raters = [Rater(taste, seed=seed * 1000 + number) for number in range(count)]
        self.random = random.Random(seed)
        self.seed = seed
        self.acknowledged = Acknowledged()
        self._slots = asyncio.Semaphore(concurrency)
        self._http = httpx.AsyncClient(
            base_url=base_url,
            headers={"authorization": f"Bearer {key}"},
            timeout=timeout_s,
            limits=httpx.Limits(max_connections=concurrency * 2),
        )
        self._openai = AsyncOpenAI(base_url=f"{base_url}/v1", api_key=key, timeout=timeout_s, max_retries=0)

    async def __aenter__(self) -> "Users":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()
        await self._openai.close()

    async def collect_votes(
        self,
        prompts: Sequence[str],
        votes: int,
        *,
        done: Callable[[], bool] = lambda: False,
        progress: Callable[[int], None] = lambda count: None,
    ) -> int:
        """Compare and vote `votes` times, over the prompts in random order, until `done()`; returns the votes cast.

        One vote in eight is a thumb on a plain chat answer, the others are choices between two answers.
        """
        order = [prompt for _ in range(votes // len(prompts) + 1) for prompt in self._shuffled(prompts)][:votes]
        cast = 0

        async def one(number: int, prompt: str) -> None:
            nonlocal cast
            async with self._slots:
                if done():
                    return
                index = number % len(self.raters)
                if number % 8 == 7:
                    await self.chat_and_thumb(index, prompt, stream=number % 16 == 7)
                else:
                    await self.compare_and_choose(index, prompt)
                cast += 1
                progress(cast)

        await asyncio.gather(*(one(number, prompt) for number, prompt in enumerate(order)))
        return cast

    async def compare_and_choose(self, index: int, prompt: str) -> None:
        """Ask for two answers to `prompt` and vote for one as rater `index` would."""
        comparison = await self._post(
            "/v1/comparisons",
            {
                "model": "flash",
                "messages": conversation(self.taste, prompt),
                "max_tokens": self.sampling.max_tokens,
                "temperature": self.sampling.temperature,
                "user": self._name(index),
            },
        )
        answers = comparison["answers"]
        self.acknowledged.response_ids += [answer["response_id"] for answer in answers]
        first, second = (answer["message"]["content"] or "" for answer in answers)
        choice = self.raters[index].choose(prompt, first, second)
        vote: dict[str, Any] = {
            "kind": "preference",
            "comparison_id": comparison["id"],
            "rater": self._name(index),
        }
        if choice == "tie":
            vote["verdict"] = "tie"
        else:
            vote |= {"verdict": "chosen", "chosen": answers[choice == "second"]["response_id"]}
        await self._vote(vote, key=comparison["id"])

    async def chat_and_thumb(self, index: int, prompt: str, *, stream: bool) -> None:
        """Chat through the official client, streamed or not, and send a thumb as rater `index` would."""
        arguments: dict[str, Any] = {
            "model": "flash",
            "messages": conversation(self.taste, prompt),
            "max_tokens": self.sampling.max_tokens,
            "temperature": self.sampling.temperature,
            "user": self._name(index),
        }

        async def ask() -> tuple[str, str]:
            if not stream:
                answer = await self._openai.chat.completions.create(**arguments)
                return answer.id, answer.choices[0].message.content or ""
            text, response_id = "", ""
            async for chunk in await self._openai.chat.completions.create(**arguments, stream=True):
                response_id = chunk.id
                text += (chunk.choices[0].delta.content or "") if chunk.choices else ""
            return response_id, text

        response_id, text = await self._retried(ask, (APIError, httpx.HTTPError))
        self.acknowledged.response_ids.append(response_id)
        value = self.raters[index].thumb(prompt, text)
        await self._vote(
            {"kind": "thumb", "response_id": response_id, "value": value, "rater": self._name(index)},
            key=response_id,
        )

    async def answers_of(
        self,
        checkpoint_ids: Sequence[str],
        prompts: Sequence[str],
        samples: int,
        progress: Callable[[int], None],
    ) -> dict[str, list[list[str]]]:
        """For each checkpoint, `samples` answers to each prompt, pinned: {checkpoint_id: [prompt][sample]}."""
        finished = 0

        async def one(checkpoint_id: str, prompt: str) -> str:
            nonlocal finished
            async with self._slots:
                body = {
                    "model": checkpoint_id,
                    "messages": conversation(self.taste, prompt),
                    "max_tokens": self.sampling.max_tokens,
                    "temperature": self.sampling.temperature,
                }
                answer = await self._post("/v1/chat/completions", body)
                finished += 1
                progress(finished)
                text: str = answer["choices"][0]["message"]["content"] or ""
                return text

        jobs = [one(checkpoint, prompt) for checkpoint in checkpoint_ids for prompt in prompts for _ in range(samples)]
        texts = iter(await asyncio.gather(*jobs))
        return {checkpoint: [[next(texts) for _ in range(samples)] for _ in prompts] for checkpoint in checkpoint_ids}

    async def _vote(self, vote: dict[str, Any], key: str) -> None:
        receipt = await self._post("/v1/feedback", vote, headers={"idempotency-key": f"vote-{key}"})
        self.acknowledged.feedback_ids.append(receipt["feedback_id"])

    async def _post(self, path: str, body: dict[str, Any], headers: dict[str, str] | None = None) -> dict[str, Any]:
        async def ask() -> dict[str, Any]:
            answer = await self._http.post(path, json=body, headers=headers)
            answer.raise_for_status()
            content: dict[str, Any] = answer.json()
            return content

        return await self._retried(ask, (httpx.HTTPError,))

    async def _retried(self, ask: Callable[[], Awaitable[T]], errors: tuple[type[Exception], ...]) -> T:
        """Call `ask` until it succeeds: a client error is final, a platform that is away is waited for PATIENCE_S."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                return await ask()
            except errors as error:
                status = getattr(getattr(error, "response", None), "status_code", None)
                if time.monotonic() > deadline or (status is not None and 400 <= status < 500 and status != 429):
                    raise
                self.acknowledged.retries += 1
                await asyncio.sleep(PAUSE_S)

    def _shuffled(self, prompts: Sequence[str]) -> list[str]:
        return self.random.sample(list(prompts), len(prompts))

    def _name(self, index: int) -> str:
        return f"rater-{self.seed}-{index:03d}"
