package boot

import (
	_ "embed"
	"slices"
	"strings"

	"gopkg.in/yaml.v3"
)

// Setting is a kernel argument, or a kernel parameter (sysctl) by its path below /proc/sys.
type Setting struct{ Name, Value, Why string }

// Unlocked replaces the argument lockdown. The kernel knows no such value, and isn't locked down.
const Unlocked = "lockdown=none"

//go:embed settings.yaml
var settingsText []byte

var settings = func() (s struct {
	Arguments, Hardening, Kubelet, Node []Setting
	HostPaths                           []HostPath
}) {
	_ = yaml.Unmarshal(settingsText, &s) // a test reads it
	return s
}()

// The tables of settings.yaml.
var (
	HardeningArguments  = settings.Arguments
	HardeningParameters = settings.Hardening
	KubeletParameters   = settings.Kubelet
	NodeParameters      = settings.Node
)

// Hardening are HardeningArguments as they are on a command line.
func Hardening() (args []string) {
	for _, s := range HardeningArguments {
		args = append(args, Param{s.Name, s.Value}.String())
	}
	return args
}

// Yield returns args without hardening arguments that others set otherwise.
func Yield(args, others []string) []string {
	return slices.DeleteFunc(slices.Clone(args), func(arg string) bool {
		return slices.ContainsFunc(HardeningArguments, func(s Setting) bool { return s.named(arg) && slices.ContainsFunc(others, s.named) })
	})
}

// named reports whether an argument sets the same.
func (s Setting) named(arg string) bool {
	key, _, _ := strings.Cut(arg, "=")
	return sameKey(key, s.Name)
}
