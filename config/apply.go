package config

import (
	"bytes"
	"cmp"
	"path"
	"slices"
	"strings"
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

// applyRow is the effect of a change of one field. refine, if set, can depend on the
// change and on both configurations.
type applyRow struct {
	path   string // with [] for the entries of a list or mapping
	effect Effect
	note   string
	refine func(row *applyRow, where place, c Change, from, to *Config) (Effect, string)
}

const (
	noteCreated   = "created in the cluster if missing, never changed there"
	notePolicies  = "the agent is created in the cluster if missing, never removed there: docs/network-policies.md"
	noteDisks     = "what is mounted stays so until the next boot"
	noteInstall   = "used at the next installation"
	noteUpgrade   = "used at the next installation or upgrade"
	noteRegisters = "those of a worker are set when it registers: Kubernetes doesn't allow a node to change its own taints"
	noteRolling   = "its static pod is replaced"
	noteUnused    = "for control planes only"
	noteFile      = "programs that read it only at their start need a restart"
)

// Short names keep the table readable.
var (
	kubelet    = Restart("kubelet")
	etcd       = Restart("etcd")
	containerd = Restart("containerd")
)

// applyTable has a row for each field of the schema, or for what the field is in where all
// its fields have the same effect. The order is that of the schema; a test compares them.
var applyTable = []applyRow{
	{path: "version", effect: Live},
	{path: "persist", effect: Live},

	{path: "machine.type", effect: Reboot},
	{path: "machine.token", effect: Live},
	{path: "machine.ca", effect: Reboot, refine: issuing},
	{path: "machine.acceptedCAs[]", effect: Live},
	{path: "machine.certSANs", effect: Live},
	{path: "machine.network.hostname", effect: kubelet, note: "the node registers under its new name"},
	{path: "machine.network.autoHostname", effect: Live, note: "used while the node has no name yet"},
	{path: "machine.network", effect: Live},
	{path: "machine.network.resolver.enabled", effect: kubelet, note: "pods use it from their next start"},
	{path: "machine.network.resolver.dnsOverTLS[]", effect: Live},
	{path: "machine.time", effect: Live},
	{path: "machine.time.bootTimeout", effect: Live, note: "used at the next boot"},
	{path: "machine.install", effect: Live, note: noteInstall},
	{path: "machine.install.extraKernelArgs", effect: Live, note: noteUpgrade},
	{path: "machine.install.keys", effect: Live, note: noteUpgrade},
	{path: "machine.install.unsigned", effect: Live, note: noteUpgrade},
	{path: "machine.disks[]", effect: Live, note: noteDisks},
	{path: "machine.kubelet.image", effect: kubelet},
	{path: "machine.kubelet.extraArgs", effect: kubelet},
	{path: "machine.kubelet.nodeLabels", effect: Live},
	{path: "machine.kubelet.nodeTaints", effect: Live, refine: ownTaints},
	{path: "machine.kubelet.clusterDNS", effect: kubelet, note: "pods use it from their next start"},
	{path: "machine.kubelet.nodeIP.validSubnets", effect: kubelet},
	{path: "machine.kubelet.extraMounts[]", effect: kubelet},
	{path: "machine.registries", effect: containerd},
	{path: "machine.images.verify[]", effect: Live, note: "used at the next pull"},
	{path: "machine.files[].content", effect: Live, note: noteFile, refine: dropIn},
	{path: "machine.files[]", effect: Live, refine: dropIn},
	{path: "machine.env", effect: containerd},
	{path: "machine.sysctls", effect: Live},
	{path: "machine.sysfs", effect: Live},
	{path: "machine.udev.rules", effect: Live, note: "what former rules have set stays"},
	{path: "machine.kernel.modules[]", effect: Live, note: "a module that is loaded stays, with its parameters, until the next boot"},
	{path: "machine.systemDiskEncryption", effect: Reboot},
	{path: "machine.logging", effect: Live},
	{path: "machine.metrics", effect: Live},
	{path: "machine.console", effect: Live},

	{path: "cluster.clusterName", effect: Reboot},
	{path: "cluster.id", effect: Live},
	{path: "cluster.secret", effect: Reboot, note: "Secrets in etcd can't be read any more, unless acceptedSecrets has the old one", refine: encrypting},
	{path: "cluster.acceptedSecrets", effect: Live, note: noteRolling, refine: onControlPlanes},
	{path: "cluster.token", effect: Live, note: "for a node that joins; the former token lets nodes join until gbctl token revoke ends it"},
	{path: "cluster.controlPlane.endpoint", effect: Live, note: "tokens of running pods have the former endpoint as their issuer, and become invalid until the kubelets renew them, unless cluster.apiServer.extraArgs has that as service-account-issuer and api-audiences"},
	{path: "cluster.controlPlane.localAPIServerPort", effect: Live, note: noteRolling},
	{path: "cluster.network.cni", effect: Live, note: noteCreated, refine: onControlPlanes},
	{path: "cluster.network.policies", effect: Live, note: notePolicies},
	{path: "cluster.network.policyAgent", effect: Live, note: noteCreated, refine: onControlPlanes},
	{path: "cluster.network.dnsDomain", effect: kubelet, note: "pods use it from their next start"},
	{path: "cluster.network.podSubnets", effect: Reboot},
	{path: "cluster.network.serviceSubnets", effect: Reboot},
	{path: "cluster.ca", effect: Reboot, refine: issuing},
	{path: "cluster.acceptedCAs[]", effect: kubelet, note: noteRolling, refine: trusted},
	{path: "cluster.aggregatorCA", effect: Reboot, refine: firstAuthority},
	{path: "cluster.acceptedAggregatorCAs[]", effect: Live, refine: onControlPlanes},
	{path: "cluster.serviceAccount.key", effect: Live, note: "tokens that were signed with the old key become invalid, unless acceptedKeys has it", refine: onControlPlanes},
	{path: "cluster.serviceAccount.acceptedKeys", effect: Live, note: noteRolling, refine: onControlPlanes},
	{path: "cluster.etcd.image", effect: etcd, refine: onControlPlanes},
	{path: "cluster.etcd.ca", effect: Reboot, refine: issuing},
	{path: "cluster.etcd.acceptedCAs[]", effect: etcd, refine: trusted},
	{path: "cluster.etcd.extraArgs", effect: etcd, refine: onControlPlanes},
	{path: "cluster.apiServer.image", effect: Live, note: noteRolling, refine: onControlPlanes},
	{path: "cluster.apiServer.extraArgs", effect: Live, note: noteRolling, refine: onControlPlanes},
	{path: "cluster.apiServer.extraVolumes[]", effect: Live, note: noteRolling, refine: onControlPlanes},
	{path: "cluster.apiServer.certSANs", effect: Live, refine: onControlPlanes},
	{path: "cluster.apiServer.auditPolicy", effect: Live, note: noteRolling, refine: onControlPlanes},
	{path: "cluster.apiServer.admissionControl[]", effect: Live, note: noteRolling, refine: onControlPlanes},
	{path: "cluster.controllerManager", effect: Live, note: noteRolling, refine: onControlPlanes},
	{path: "cluster.scheduler", effect: Live, note: noteRolling, refine: onControlPlanes},
	{path: "cluster.proxy", effect: Live, note: noteCreated, refine: onControlPlanes},
	{path: "cluster.coreDNS", effect: Live, note: noteCreated, refine: onControlPlanes},
	{path: "cluster.allowSchedulingOnControlPlanes", effect: Live, refine: onControlPlanes},
	{path: "cluster.extraManifests", effect: Live, note: noteCreated, refine: onControlPlanes},
	{path: "cluster.inlineManifests[]", effect: Live, note: noteCreated, refine: onControlPlanes},
}

// applyRows is the table by path.
var applyRows = func() map[string]*applyRow {
	rows := make(map[string]*applyRow, len(applyTable))
	for i := range applyTable {
		rows[applyTable[i].path] = &applyTable[i]
	}
	return rows
}()

// rowOf is the row of a field: its own, or that of what it is in.
func rowOf(path string) *applyRow {
	for {
		if row := applyRows[path]; row != nil || path == "" {
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
	return row.effect, row.note
}

// ownTaints: a control plane can change its taints, because it has an administrator's
// access.
func ownTaints(row *applyRow, _ place, _ Change, _, to *Config) (Effect, string) {
	if to.Machine.Type == Worker {
		return row.effect, noteRegisters
	}
	return row.effect, row.note
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
		return row.effect, row.note
	}
	if a.Name == KubernetesAuthority {
		return kubelet, "the kubelet gets another certificate"
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
	return row.effect, row.note
}

// containerdDropIns is where containerd looks for further configuration, at its
// start only.
const containerdDropIns = "/var/cri/conf.d"

func dropIn(row *applyRow, where place, _ Change, _, _ *Config) (Effect, string) {
	// machine.files[PATH].field
	if name, ok := where[len(where)-2].(entry); ok {
		name := path.Clean(string(name))
		if path.Dir(name) == containerdDropIns || slices.Contains(caBundles, name) {
			return containerd, "containerd reads it at its start"
		}
	}
	return row.effect, row.note
}

// caBundles are the names of the authorities that the node trusts.
var caBundles = []string{"/etc/ssl/certs/ca-certificates", "/etc/ssl/certs/ca-certificates.crt"}
