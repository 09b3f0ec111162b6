// DeepSeek-V2's chat template, recognised by its exact text.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace mla {

struct ChatMessage {
  std::string role;  // "system", "user" or "assistant"
  std::string content;
};

class ChatTemplate {
 public:
  // The template of DIR/chat_template.jinja, else `config_template` (tokenizer_config.json's).
  // Nothing is refused here: a model without a template, or with another one, still serves
  // completions; render() then throws.
  static ChatTemplate load(const std::string& model_dir, std::string config_template,
                           std::string bos_text, std::string eos_text);

  const std::string& text() const { return text_; }  // of the template; "": none

  // True where render() knows the template.
  bool usable() const;

  // BOS; system → content "\n\n"; user → "User: " content "\n\n"; assistant → "Assistant: "
  // content EOS; then the generation prompt "Assistant:". Throws Error: no template, a template
  // whose text is not DeepSeek-V2's (its beginning is quoted, with the advice to send rendered
  // prompts), an unknown role (named), no message.
  std::string render(const std::vector<ChatMessage>& messages,
                     bool add_generation_prompt = true) const;

 private:
  std::string text_, source_, bos_, eos_;
};

}  // namespace mla
