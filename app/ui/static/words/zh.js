// 页面的中文文字。与 words/en.js 的键相同。
export default {
  // 框架
  "frame.tabs": "页面",
  "frame.chat": "对话",
  "frame.models": "模型",
  "frame.monitor": "监控",
  "frame.settings": "设置",
  "frame.loading": "正在加载模型",
  "frame.status.empty": "未加载模型",
  "frame.status.loading": "加载中",
  "frame.status.ready": "就绪",
  "frame.status.failed": "加载失败",
  "frame.status.gone": "Fireside 未在运行",
  "frame.failed": "页面的这一部分无法打开：{message}",
  "frame.refused": "服务器返回 {status}。",
  "frame.unreachable": "无法连接 Fireside。它还在运行吗？",
};
