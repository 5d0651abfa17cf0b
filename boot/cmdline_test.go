package boot

import (
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestParseCmdline(t *testing.T) {
	for _, tt := range []struct {
		name, line string
		want       Cmdline
	}{
		{"empty", " \n", Cmdline{}},
		{"usual", "BOOT_IMAGE=/vmlinuz quiet  console=tty0 console=ttyS0,115200\n", Cmdline{
			Params: []Param{{"BOOT_IMAGE", "/vmlinuz"}, {"quiet", ""}, {"console", "tty0"}, {"console", "ttyS0,115200"}},
		}},
		{"value with an equals sign", "garboard.config=http://h/c?mac=1", Cmdline{
			Params: []Param{{"garboard.config", "http://h/c?mac=1"}},
		}},
		{"twice", "garboard.config=metal-iso garboard.config=http://h/", Cmdline{
			Params: []Param{{"garboard.config", "metal-iso"}, {"garboard.config", "http://h/"}},
		}},
		{"quoted value", `dyndbg="file a +p" x=1`, Cmdline{Params: []Param{{"dyndbg", "file a +p"}, {"x", "1"}}}},
		{"quoted parameter", `"dyndbg=file a +p" x`, Cmdline{Params: []Param{{"dyndbg", "file a +p"}, {"x", ""}}}},
		{"open quote", `a="b c`, Cmdline{Params: []Param{{"a", "b c"}}}},
		{"init's arguments", "a -- garboard.config=x", Cmdline{Params: []Param{{"a", ""}}}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if diff := cmp.Diff(tt.want, ParseCmdline(tt.line)); diff != "" {
				t.Error(diff)
			}
		})
	}
}

func TestCmdlineGet(t *testing.T) {
	c := ParseCmdline("init_on_alloc=1 a-b=1 a_b=2 quiet")
	if v, ok := c.Get("a-b"); v != "2" || !ok {
		t.Error(v, ok)
	}
	if v, ok := c.Get("quiet"); v != "" || !ok {
		t.Error(v, ok)
	}
	if v, ok := c.Get("loud"); v != "" || ok {
		t.Error(v, ok)
	}
}

func TestCredentials(t *testing.T) {
	for value, want := range map[string]bool{
		"http://me:hunter2@h/c": true, "http://hunter2@h/c": true, "http://h/c?token=x": true, "http://h/c?a=1&key=x": true, "data:;base64,eA==": true,
		"http://h/c?mac=${mac}": false, "https://h/${serial}.yaml": false, ISOLabel: false,
	} {
		if got := (Param{ParamConfig, value}).Credentials(); got != want {
			t.Errorf("%s: %v", value, got)
		}
	}
	if (Param{"ip", "http://me:hunter2@h/"}).Credentials() {
		t.Error("another parameter")
	}
}
