package kernel

import (
	"bytes"
	"compress/gzip"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/klauspost/compress/zstd"
	"github.com/ulikunitz/xz"
)

// tree writes a module folder as depmod would have left it.
func tree(t *testing.T, files map[string]string) string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "6.1.0-test")
	for name, contents := range files {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(contents), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

func small(t *testing.T) string {
	return tree(t, map[string]string{
		"modules.dep": "kernel/fs/xfs/xfs.ko: kernel/lib/libcrc32c.ko\n" +
			"kernel/lib/libcrc32c.ko:\n" +
			"kernel/crypto/crc32c-intel.ko:\n" +
			"kernel/net/wireguard.ko.xz: kernel/lib/libcurve.ko kernel/net/udp_tunnel.ko\n" +
			"kernel/lib/libcurve.ko:\n" +
			"kernel/net/udp_tunnel.ko:\n" +
			"kernel/sound/snd.ko: kernel/sound/core.ko\n" +
			"kernel/sound/core.ko:\n",
		"modules.softdep": "# Soft dependencies extracted from modules themselves.\n" +
			"softdep libcrc32c pre: crc32c-intel crypto-crc32c post: nosuch\n",
		"modules.builtin":                "kernel/fs/ext4/ext4.ko\nkernel/drivers/nvme/host/nvme-core.ko\n",
		"modules.order":                  "kernel/sound/snd.o\nkernel/net/wireguard.o\nkernel/fs/xfs/xfs.ko\n",
		"modules.builtin.modinfo":        "",
		"kernel/fs/xfs/xfs.ko":           "xfs",
		"kernel/lib/libcrc32c.ko":        "libcrc32c",
		"kernel/crypto/crc32c-intel.ko":  "crc32c-intel",
		"kernel/net/wireguard.ko.xz":     compressed(t, "wireguard", func(w io.Writer) (io.WriteCloser, error) { return xz.NewWriter(w) }),
		"kernel/lib/libcurve.ko":         "libcurve",
		"kernel/net/udp_tunnel.ko":       "udp_tunnel",
		"kernel/sound/snd.ko":            "snd",
		"kernel/sound/core.ko":           "core",
		"kernel/drivers/video/unused.ko": "unused",
	})
}

func compressed(t *testing.T, text string, with func(io.Writer) (io.WriteCloser, error)) string {
	t.Helper()
	var b bytes.Buffer
	w, err := with(&b)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := io.WriteString(w, text); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.String()
}

func TestSelectClosesTheList(t *testing.T) {
	files, err := Select(small(t), Cloud, []Row{
		{Names: "xfs ext4", Why: "filesystems"},
		{Names: "wireguard nvme_core", Why: "links"},
		{Names: "ahci", Why: "metal", Only: Generic},
		{Names: "bcachefs", Why: "new", Optional: true},
	})
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, file := range files {
		names = append(names, moduleName(file))
	}
	slices.Sort(names)
	// ext4 and nvme_core are built in.
	want := []string{"crc32c_intel", "libcrc32c", "libcurve", "udp_tunnel", "wireguard", "xfs"}
	if diff := cmp.Diff(want, names); diff != "" {
		t.Errorf("modules (-want +got):\n%s", diff)
	}
}

func TestSelectReportsAllThatIsMissing(t *testing.T) {
	_, err := Select(small(t), Generic, []Row{
		{Names: "xfs ahci", Why: "disks"},
		{Names: "tg3", Why: "Broadcom", Only: Generic},
		{Names: "hv_vmbus", Why: "Hyper-V", Only: Cloud},
	})
	if err == nil {
		t.Fatal("no error")
	}
	for _, want := range []string{"ahci", "disks", "tg3", "Broadcom", "6.1.0-test", "generic"} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("error %q doesn't mention %q", err, want)
		}
	}
	if strings.Contains(err.Error(), "hv_vmbus") {
		t.Errorf("error %q mentions a module of another flavour", err)
	}
}

func TestCopyDecompressesAndKeepsOrder(t *testing.T) {
	from := small(t)
	files, err := Select(from, Cloud, []Row{{Names: "xfs wireguard", Why: "test"}})
	if err != nil {
		t.Fatal(err)
	}
	to := filepath.Join(t.TempDir(), "copy")
	if err := copyModules(files, from, to); err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]string{
		"kernel/net/wireguard.ko": "wireguard",
		"kernel/fs/xfs/xfs.ko":    "xfs",
		"modules.order":           "kernel/net/wireguard.o\nkernel/fs/xfs/xfs.ko\n",
	} {
		got, err := os.ReadFile(filepath.Join(to, name))
		if err != nil || string(got) != want {
			t.Errorf("%s = %q, %v; want %q", name, got, err, want)
		}
	}
	if _, err := os.Stat(filepath.Join(to, "kernel/sound")); !os.IsNotExist(err) {
		t.Errorf("a module that nobody asked for came along: %v", err)
	}
}

func TestPlainModule(t *testing.T) {
	for name, file := range map[string]string{
		"a.ko":     "module",
		"a.ko.xz":  compressed(t, "module", func(w io.Writer) (io.WriteCloser, error) { return xz.NewWriter(w) }),
		"a.ko.zst": compressed(t, "module", func(w io.Writer) (io.WriteCloser, error) { return zstd.NewWriter(w) }),
		"a.ko.gz":  compressed(t, "module", func(w io.Writer) (io.WriteCloser, error) { return gzip.NewWriter(w), nil }),
	} {
		plain, got, err := PlainModule(name, strings.NewReader(file))
		if err != nil || plain != "a.ko" || string(got) != "module" {
			t.Errorf("%s: %s, %q, %v", name, plain, got, err)
		}
	}
	if _, _, err := PlainModule("a.ko.br", strings.NewReader("")); err == nil {
		t.Error("no error for an unknown compression")
	}
}

// The table is for people: each module once, each row with its reason.
func TestModulesTable(t *testing.T) {
	seen := map[string]bool{}
	for _, row := range Modules() {
		if row.Why == "" {
			t.Errorf("%s: no reason", row.Names)
		}
		for _, name := range strings.Fields(row.Names) {
			if seen[name] {
				t.Errorf("%s is listed twice", name)
			}
			seen[name] = true
			if name != canonical(name) {
				t.Errorf("%s: write it as /proc/modules does, %s", name, canonical(name))
			}
		}
	}
}

// docs/media.md says in which drives the smaller kernel reads its own medium.
func TestCloudKernelReadsMediaAtSCSI(t *testing.T) {
	cloud := map[string]bool{}
	for _, row := range Modules() {
		if row.Optional || row.Only != "" && row.Only != Cloud {
			continue
		}
		for _, name := range strings.Fields(row.Names) {
			cloud[name] = true
		}
	}
	for _, name := range []string{"isofs", "sr_mod", "sd_mod", "virtio_blk", "virtio_scsi", "vmw_pvscsi", "hv_storvsc"} {
		if !cloud[name] {
			t.Errorf("the smaller kernel may be without %s", name)
		}
	}
	for _, name := range []string{"ahci", "usb_storage"} {
		if cloud[name] {
			t.Errorf("the smaller kernel has %s: docs/media.md and the help of media build say that it hasn't", name)
		}
	}
}
