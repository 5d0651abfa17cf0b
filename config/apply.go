package config

import (
	"bytes"
	"cmp"
	_ "embed"
	"path"
	"slices"
	"strings"
	"sync"

	"gopkg.in/yaml.v3"
)

// Effect is what a changed field needs to take effect on a running node.
type Effect string

const (
	Live   Effect = "live"   // at once: a controller acts on it
	Reboot Effect = "reboot" // with the next boot

	restart = "service:"
)

// Restart is the effect of restarting one service.
func Restart(id string) Effect { return Effect(restart + id) }

// Service is the ID of the service that restarts, if one does.
func (e Effect) Service() (id string, ok bool) { return strings.CutPrefix(string(e), restart) }

// restarted are the services that an effect can name, ordered by impact: pods keep
// running without the kubelet, the apiserver stops with its etcd member, and images and
// containers need containerd.
var restarted = []string{"kubelet", "etcd", "containerd"}

func (e Effect) rank() int {
	if id, ok := e.Service(); ok {
		return 1 + slices.Index(restarted, id)
	}
	if e == Live {
		return 0
	}
	return 1 + len(restarted)
}

// Effects are the effects of all changes, each once, the mildest first.
func Effects(changes []Change) []Effect {
	var effects []Effect
	for _, c := range changes {
		if !slices.Contains(effects, c.Effect) {
			effects = append(effects, c.Effect)
		}
	}
	slices.SortFunc(effects, func(a, b Effect) int { return cmp.Compare(a.rank(), b.rank()) })
	return effects
}

// applyRow is the effect of a change of one field.
type applyRow struct {
	Effect Effect
	Note   string
	Refine string // one of refinements, or ""
}

// refinements can depend on the change and on both configurations.
var refinements = map[string]func(row *applyRow, where place, c Change, from, to *Config) (Effect, string){
	"onControlPlanes": onControlPlanes, "firstAuthority": firstAuthority, "issuing": issuing,
	"encrypting": encrypting, "unlocking": unlocking, "trusted": trusted, "dropIn": dropIn,
}

//go:embed fields.yaml
var fieldsText []byte

// tables are those of fields.yaml. Tests compare them with the schema.
var tables = sync.OnceValue(func() (t struct {
	Effects  map[string]*applyRow
	Comments map[string]string
	Defaults map[string]yaml.Node
	Values   map[string]*valueRule
	Groups   map[string][]valueGroup
	Reserved map[string]string
}) {
	_ = yaml.Unmarshal(fieldsText, &t)
	return t
})

// Notes of refinements.
const (
	noteRolling = "its static pod is replaced"
	noteUnused  = "for control planes only"
)

// rowOf is the row of a field: its own, or that of what it is in.
func rowOf(path string) *applyRow {
	for {
		if row := tables().Effects[path]; row != nil || path == "" {
			return row
		}
		path = path[:max(strings.LastIndexByte(path, '.'), 0)]
	}
}

// onControlPlanes removes the effect of settings that a worker doesn't use.
func onControlPlanes(row *applyRow, _ place, _ Change, _, to *Config) (Effect, string) {
	if to.Machine.Type == Worker {
		return Live, noteUnused
	}
	return row.Effect, row.Note
}

// firstAuthority: a cluster without such an authority gets one without a reboot, and loses
// it in the same way. This happens when the control plane of another system is adopted, or a
// self-hosted one is converted, and when this is undone.
func firstAuthority(row *applyRow, where place, c Change, from, to *Config) (Effect, string) {
	if c.Op != Changed {
		return Live, noteRolling
	}
	return issuing(row, where, c, from, to)
}

// issuing: the programs that are to trust another authority read it at their start. If they
// trust both authorities already, only certificates are issued again.
func issuing(row *applyRow, where place, c Change, from, to *Config) (Effect, string) {
	a := authorityAt(where)
	if !a.Workers && to.Machine.Type == Worker {
		return Live, noteUnused
	}
	was, wasAccepted := a.Of(from)
	is, isAccepted := a.Of(to)
	if bytes.Equal(was.Crt, is.Crt) || !accepts(*wasAccepted, is.Crt) || !accepts(*isAccepted, was.Crt) {
		return row.Effect, row.Note
	}
	if a.Name == KubernetesAuthority {
		return Restart("kubelet"), "the kubelet gets another certificate"
	}
	return Live, "certificates are issued again"
}

// encrypting: with both secrets before and after, all Secrets in etcd can be read.
func encrypting(row *applyRow, where place, c Change, from, to *Config) (Effect, string) {
	if slices.Contains(from.Cluster.AcceptedSecrets, to.Cluster.Secret) && slices.Contains(to.Cluster.AcceptedSecrets, from.Cluster.Secret) {
		return Live, noteRolling
	}
	return onControlPlanes(row, where, c, from, to)
}

func accepts(accepted []CertKey, crt PEM) bool {
	return slices.ContainsFunc(accepted, func(a CertKey) bool { return bytes.Equal(a.Crt, crt) })
}

// trusted: programs restart only for another set of authorities.
func trusted(row *applyRow, where place, c Change, from, to *Config) (Effect, string) {
	a := authorityAt(where)
	was, wasAccepted := a.Of(from)
	is, isAccepted := a.Of(to)
	if bytes.Equal(Trusted(*was, *wasAccepted), Trusted(*is, *isAccepted)) {
		return Live, ""
	}
	if !a.Workers {
		return onControlPlanes(row, where, c, from, to)
	}
	return row.Effect, row.Note
}

// containerdDropIns is where containerd looks for further configuration, at its
// start only.
const containerdDropIns = "/var/cri/conf.d"

func dropIn(row *applyRow, where place, _ Change, _, _ *Config) (Effect, string) {
	// machine.files[PATH].field
	if name, ok := where[len(where)-2].(entry); ok {
		name := path.Clean(string(name))
		if path.Dir(name) == containerdDropIns || slices.Contains(caBundles, name) {
			return Restart("containerd"), "containerd reads it at its start"
		}
	}
	return row.Effect, row.Note
}

// caBundles are the names of the authorities that the node trusts.
var caBundles = []string{"/etc/ssl/certs/ca-certificates", "/etc/ssl/certs/ca-certificates.crt"}
