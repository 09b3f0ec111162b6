#include "lib/text/chat_template.h"

#include <filesystem>

#include "lib/base/error.h"
#include "lib/base/json.h"
#include "lib/text/utf8.h"

namespace mla {
namespace {

// What render() puts into words below; llama.cpp's tests know the same template as "DeepSeek-V2".
constexpr std::string_view kDeepSeekV2 =
    "{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}"
    "{% endif %}{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'user' %}{{ 'User: ' + message['content'] + '\n\n' }}"
    "{% elif message['role'] == 'assistant' %}"
    "{{ 'Assistant: ' + message['content'] + eos_token }}"
    "{% elif message['role'] == 'system' %}{{ message['content'] + '\n\n' }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}";

constexpr size_t kQuoted = 60;  // bytes of a template that a message shows, about

std::string beginning(const std::string& text) {
  if (text.size() <= kQuoted) return text;
  std::string quoted;
  append_utf8_lossy(std::string_view(text).substr(0, kQuoted), false, quoted);
  return quoted + "…";
}

}  // namespace

ChatTemplate ChatTemplate::load(const std::string& model_dir, std::string config_template,
                                std::string bos_text, std::string eos_text) {
  ChatTemplate chat;
  const std::string path = model_dir + "/chat_template.jinja";
  if (has_entry(path)) {
    chat.source_ = path;
    chat.text_ = read_file(path);
  } else {
    chat.source_ = model_dir + "/tokenizer_config.json";
    chat.text_ = std::move(config_template);
  }
  chat.bos_ = std::move(bos_text);
  chat.eos_ = std::move(eos_text);
  return chat;
}

// Jinja drops a newline at the end of a template.
bool ChatTemplate::usable() const {
  std::string_view text = text_;
  if (text.ends_with('\n')) text.remove_suffix(1);
  return text == kDeepSeekV2;
}

std::string ChatTemplate::render(const std::vector<ChatMessage>& messages,
                                 bool add_generation_prompt) const {
  if (text_.empty())
    fail("{}: no chat template; send rendered prompts instead of messages", source_);
  if (!usable())
    fail(
        "{}: expected the chat template of DeepSeek-V2, found another one, \"{}\"; send rendered "
        "prompts instead of messages",
        source_, beginning(text_));
  if (messages.empty()) fail("messages: expected at least one, found none");
  std::string out = bos_;
  for (const ChatMessage& message : messages) {
    if (message.role == "user") {
      out += "User: " + message.content + "\n\n";
    } else if (message.role == "assistant") {
      out += "Assistant: " + message.content + eos_;
    } else if (message.role == "system") {
      out += message.content + "\n\n";
    } else {
      fail("messages: expected the role system, user or assistant, found \"{}\"", message.role);
    }
  }
  if (add_generation_prompt) out += "Assistant:";
  return out;
}

}  // namespace mla
