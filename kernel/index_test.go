package kernel

import (
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/garboard-os/garboard/tools/testing/module"
)

const testRelease = "6.12.0-test"

// folder is a module folder in which a needs b and c, and c needs b.
func folder() map[string]string {
	m := func(fields ...string) string { return string(module.Module(testRelease, fields...)) }
	return map[string]string{
		"kernel/a.ko":             m("depends=b,c", "alias=pci:v00008086d*sv*", "alias=net-pf-[0-9]-proto", "softdep=pre: d"),
		"kernel/drivers/b.ko":     m("depends="),
		"kernel/drivers/c-d.ko":   m("depends=b", "alias=pci:v00008086d*sv*"),
		"kernel/drivers/c.ko":     m("depends=b,built_in"),
		"kernel/drivers/d.ko":     m("alias=devname:net/d", "alias=char-major-10-200", "alias=block-major-7-*"),
		"modules.builtin":         "kernel/lib/built-in.ko\n",
		"modules.builtin.modinfo": "built_in.alias=crypto-fast\x00built_in.license=GPL\x00",
		"modules.order":           "kernel/drivers/c-d.ko\nkernel/a.ko\n",
	}
}

func indexOf(files map[string]string) (map[string][]byte, error) {
	return Index(slices.Sorted(maps.Keys(files)), func(name string) ([]byte, error) {
		text, ok := files[name]
		if !ok {
			return nil, os.ErrNotExist
		}
		return []byte(text), nil
	})
}

// modprobe finds with these indexes what the modules say.
func TestIndex(t *testing.T) {
	t.Parallel()
	made, err := indexOf(folder())
	if err != nil {
		t.Fatal(err)
	}
	base := t.TempDir()
	dir := filepath.Join(base, "lib/modules", testRelease)
	put := func(name string, content []byte) {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, content, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	for name, text := range folder() {
		put(name, []byte(text))
	}
	for name, content := range made {
		put(name, content)
	}
	for name, want := range map[string]string{
		"a": "drivers/b drivers/c drivers/d a", "b": "drivers/b", "c-d": "drivers/b drivers/c-d", "c_d": "drivers/b drivers/c-d",
		"pci:v00008086d00001533sv1": "drivers/b drivers/c-d drivers/b drivers/c drivers/d a", "net-pf-3-proto": "drivers/b drivers/c drivers/d a",
		"built-in": "", "crypto-fast": "", "nothing": "not found", "pci:v00008087d00001533sv1": "not found",
	} {
		out, err := exec.CommandContext(t.Context(), "modprobe", "-d", base, "-S", testRelease, "--show-depends", name).CombinedOutput()
		var found []string
		for _, field := range strings.Fields(string(out)) {
			if file, ok := strings.CutPrefix(field, dir+"/kernel/"); ok {
				found = append(found, strings.TrimSuffix(file, ".ko"))
			}
		}
		got := strings.Join(found, " ")
		if err != nil {
			got = "not found"
		}
		if got != want {
			t.Errorf("%s: %q, want %q: %s", name, got, want, out)
		}
	}
	for name, lines := range map[string][]string{
		"modules.dep":     {"kernel/a.ko: kernel/drivers/c.ko kernel/drivers/b.ko", "kernel/drivers/b.ko:", "kernel/drivers/c-d.ko: kernel/drivers/b.ko"},
		"modules.alias":   {"alias net-pf-[0-9]-proto a"},
		"modules.softdep": {"softdep a pre: d"},
		"modules.devname": {"d net/d c10:200"},
	} {
		for _, line := range lines {
			if !slices.Contains(strings.Split(string(made[name]), "\n"), line) {
				t.Errorf("%s has no line %q:\n%s", name, line, made[name])
			}
		}
	}
}

func TestIndexRefuses(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct{ file, text, want string }{
		"missing": {"kernel/drivers/b.ko", "", " needs b, which isn't there"},
		"no ELF":  {"kernel/a.ko", "text", "module kernel/a.ko: "},
	} {
		files := folder()
		if files[c.file] = c.text; c.text == "" {
			delete(files, c.file)
		}
		if _, err := indexOf(files); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestMagic(t *testing.T) {
	t.Parallel()
	if got, err := Magic(module.Module(testRelease, "name=a")); got != testRelease || err != nil {
		t.Errorf("%q, %v", got, err)
	}
	if _, err := Magic([]byte("text")); err == nil {
		t.Error("a text is a module")
	}
}

// Of two modules with one name, the kernel's own is the last to count, and an update the first, as with depmod.
func TestIndexHasEachModuleOnce(t *testing.T) {
	t.Parallel()
	m := func(alias string) string { return string(module.Module(testRelease, "alias="+alias)) }
	files := map[string]string{"extra/a.ko": m("x:new"), "kernel/a.ko": m("x:old"), "extra/b.ko": m("x:newer"), "updates/b.ko": m("x:update")}
	made, err := indexOf(files)
	if err != nil {
		t.Fatal(err)
	}
	if got := string(made["modules.dep"]); got != "extra/a.ko:\nupdates/b.ko:\n" {
		t.Errorf("modules.dep:\n%s", got)
	}
	if got := string(made["modules.alias"]); strings.Contains(got, "x:old") || strings.Contains(got, "x:newer") {
		t.Errorf("modules.alias:\n%s", got)
	}
}
