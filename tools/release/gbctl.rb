class Gbctl < Formula
  desc "Client of Garboard, an appliance operating system for Kubernetes nodes"
  homepage "https://github.com/garboard-os/garboard"
  version "$VERSION"
  license "Apache-2.0"

  on_macos do
    on_arm do
      url "https://github.com/garboard-os/garboard/releases/download/v$VERSION/gbctl_v$VERSION_darwin_arm64.tar.gz"
      sha256 "$darwin_arm64"
    end
    on_intel do
      url "https://github.com/garboard-os/garboard/releases/download/v$VERSION/gbctl_v$VERSION_darwin_amd64.tar.gz"
      sha256 "$darwin_amd64"
    end
  end

  on_linux do
    on_arm do
      url "https://github.com/garboard-os/garboard/releases/download/v$VERSION/gbctl_v$VERSION_linux_arm64.tar.gz"
      sha256 "$linux_arm64"
    end
    on_intel do
      url "https://github.com/garboard-os/garboard/releases/download/v$VERSION/gbctl_v$VERSION_linux_amd64.tar.gz"
      sha256 "$linux_amd64"
    end
  end

  def install
    bin.install "gbctl"
    man1.install Dir["man/*.1"]
    bash_completion.install "completions/gbctl"
    zsh_completion.install "completions/_gbctl"
    fish_completion.install "completions/gbctl.fish"
  end

  test do
    assert_match "v#{version}", shell_output("#{bin}/gbctl version --client")
  end
end
