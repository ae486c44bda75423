"""LangChain's chat and completion models; OPENAI_BASE_URL says where."""

from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI

chat = ChatOpenAI(model="tiny", temperature=0, max_tokens=12)
print(chat.invoke("hello there").content)
print("".join(chunk.content for chunk in chat.stream([SystemMessage("be brief"), HumanMessage("hello")])))
print([answer.content for answer in chat.batch(["one", "two", "three"])])
chain = ChatPromptTemplate.from_messages([("system", "be brief"), ("human", "say {word}")]) | chat
print(chain.invoke({"word": "yes"}).usage_metadata)
print(chat.bind(logprobs=True, seed=3, stop=["zz"]).invoke("hello").response_metadata["finish_reason"])


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


call = AIMessage("", tool_calls=[{"name": "add", "args": {"a": 1, "b": 2}, "id": "call_1"}])
history = [HumanMessage("1 and 2?"), call, ToolMessage("3", tool_call_id="call_1")]
print(chat.bind_tools([add]).invoke(history).content)
print(OpenAI(model="tiny", temperature=0, max_tokens=6).invoke("ab"))
