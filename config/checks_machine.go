package config

import (
	"io/fs"
	"maps"
	"regexp"
	"slices"
	"strings"

	"github.com/garboard-os/garboard/config/pki"
)

var (
	labelName  = regexp.MustCompile(`^[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?$`)
	sysctlName = regexp.MustCompile(`^[a-z0-9_-]+([./][A-Za-z0-9_:-]+)+$`)
	moduleName = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9_-]*$`)
	// moduleParameter is one as finit_module(2) takes it.
	moduleParameter = regexp.MustCompile(`^[A-Za-z0-9_-]+(=[^\s"]*)?$`)
	envName         = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_]*$`)
	// registryHost is the name of a registry as image references spell it.
	registryHost = regexp.MustCompile(`^(\*|[A-Za-z0-9][A-Za-z0-9.-]*(:[0-9]+)?|\[[0-9a-fA-F:]+\](:[0-9]+)?)$`)

	// kubeletLabels are the labels and prefixes within Kubernetes' own domains that a
	// kubelet may set on its own node. With others, it doesn't start (NodeRestriction,
	// https://kubernetes.io/docs/reference/access-authn-authz/admission-controllers/).
	kubeletLabels = []string{
		"kubernetes.io/hostname", "kubernetes.io/arch", "kubernetes.io/os", "beta.kubernetes.io/arch", "beta.kubernetes.io/os",
		"node.kubernetes.io/instance-type", "beta.kubernetes.io/instance-type", "topology.kubernetes.io/region", "topology.kubernetes.io/zone",
		"failure-domain.beta.kubernetes.io/region", "failure-domain.beta.kubernetes.io/zone",
	}
	kubeletDomains = []string{"kubelet.kubernetes.io", "node.kubernetes.io"}
)

func checkNodeLabels(c *Config, r *report) {
	for _, key := range slices.Sorted(maps.Keys(c.Machine.Kubelet.NodeLabels)) {
		where := at("machine", "kubelet", "nodeLabels", key)
		domain, name, prefixed := strings.Cut(key, "/")
		if !prefixed {
			domain, name = "", key
		}
		value := c.Machine.Kubelet.NodeLabels[key]
		switch {
		case !labelName.MatchString(name) || prefixed && !isDNSName(domain):
			r.bad(where, "is not the name of a label")
		case value != "" && !labelName.MatchString(value):
			r.bad(where, "%s can't be the value of a label", quote(value))
		case (inDomain(domain, "kubernetes.io") || inDomain(domain, "k8s.io")) && !slices.Contains(kubeletLabels, key) &&
			!slices.ContainsFunc(kubeletDomains, func(d string) bool { return inDomain(domain, d) }):
			r.bad(where, "a kubelet may not set this label on itself; did you mean node.kubernetes.io/%s", name)
		}
	}
}

func checkNodeTaints(c *Config, r *report) {
	for _, key := range slices.Sorted(maps.Keys(c.Machine.Kubelet.NodeTaints)) {
		domain, name, prefixed := strings.Cut(key, "/")
		if !prefixed {
			domain, name = "", key
		}
		if !labelName.MatchString(name) || prefixed && !isDNSName(domain) {
			r.bad(at("machine", "kubelet", "nodeTaints", key), "is not the name of a taint")
		}
	}
}

func inDomain(name, domain string) bool { return name == domain || strings.HasSuffix(name, "."+domain) }

func checkRegistries(c *Config, r *report) {
	mirrors := at("machine", "registries", "mirrors")
	for _, host := range slices.Sorted(maps.Keys(c.Machine.Registries.Mirrors)) {
		checkRegistryHost(r, mirrors.with(host), host)
		mirror := c.Machine.Registries.Mirrors[host]
		if len(mirror.Endpoints) == 0 {
			r.lacks(mirrors.with(host, "endpoints"), "a mirror without endpoints has no images")
		}
		for i, u := range mirror.Endpoints {
			checkHTTP(r, mirrors.with(host, "endpoints", i), u)
			if u.User != nil {
				r.bad(mirrors.with(host, "endpoints", i), "has a user: that belongs to machine.registries.config")
			}
			if mirror.OverridePath && RegistryPath(u.URL, true) == "" {
				r.bad(mirrors.with(host, "endpoints", i), "has no path, which overridePath needs: append /v2, or leave overridePath out")
			}
		}
	}
	hosts := at("machine", "registries", "config")
	for _, host := range slices.Sorted(maps.Keys(c.Machine.Registries.Config)) {
		reg := c.Machine.Registries.Config[host]
		checkRegistryHost(r, hosts.with(host), host)
		if a := reg.Auth; a != nil {
			ways := 0
			for _, used := range []bool{a.Username != "" || a.Password != "", a.Auth != "", a.IdentityToken != ""} {
				if used {
					ways++
				}
			}
			if host == "*" {
				r.bad(hosts.with(host, "auth"), "would give the credentials to every host: name the hosts that they are for, such as registry.example.org:5000")
			} else if ways != 1 {
				r.bad(hosts.with(host, "auth"), "needs exactly one of username with password, auth, and identityToken")
			} else if (a.Username == "") != (a.Password == "") {
				r.bad(hosts.with(host, "auth"), "username and password belong together")
			}
		}
		if t := reg.TLS; t != nil && (len(t.ClientIdentity.Crt) == 0) != (len(t.ClientIdentity.Key) == 0) {
			r.bad(hosts.with(host, "tls", "clientIdentity"), "crt and key belong together")
		}
	}
}

// MinPartition is the smallest partition of a data disk, in bytes: mkfs.xfs refuses less than 300 MiB.
const MinPartition = 320 << 20

// dataMount is where a partition of a data disk is mounted.
var dataMount = regexp.MustCompile(`^/var/mnt/[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?$`)

func checkDisks(c *Config, r *report) {
	mounts := map[string]bool{}
	for i, disk := range c.Machine.Disks {
		where := at("machine", "disks", i)
		if disk.Name == "" {
			r.lacks(where.with("name"), "such as data")
		}
		checkDevice(r, where.with("device"), disk.Device)
		if disk.Device == "" && disk.DiskSelector == (DiskSelector{}) {
			r.lacks(where.with("device"), "or a diskSelector")
		}
		if disk.Wipe && !exact(disk.DiskSelector.Serial) && !exact(disk.DiskSelector.WWID) && !strings.HasPrefix(disk.Device, "/dev/disk/by-id/") {
			r.bad(where.with("wipe"), "needs a disk that is named for good: a device in /dev/disk/by-id, or a diskSelector with serial or wwid, without an asterisk. Other names can be those of another disk after the next boot")
		}
		if len(disk.Partitions) == 0 {
			r.lacks(where.with("partitions"), "such as [{mountpoint: /var/mnt/data}]")
		}
		for n, p := range disk.Partitions {
			where := where.with("partitions", n)
			switch {
			case !dataMount.MatchString(p.Mountpoint):
				r.bad(where.with("mountpoint"), "%s is not /var/mnt/NAME, with a NAME of at most 32 of the characters a-z, 0-9 and -", quote(p.Mountpoint))
			case mounts[p.Mountpoint]:
				r.bad(where.with("mountpoint"), "another partition is mounted there, too")
			}
			mounts[p.Mountpoint] = true
			if p.Size == 0 && n < len(disk.Partitions)-1 {
				r.lacks(where.with("size"), "only the last partition can have the rest of the disk")
			} else if p.Size != 0 && p.Size < MinPartition {
				r.bad(where.with("size"), "is less than 320 MiB")
			}
		}
	}
}

// exact reports whether a property of a selector is that of one disk.
func exact(pattern string) bool { return pattern != "" && !strings.Contains(pattern, "*") }

func checkKernelModules(c *Config, r *report) {
	for i, m := range c.Machine.Kernel.Modules {
		where := at("machine", "kernel", "modules", i)
		switch {
		case m.Name == "":
			r.lacks(where.with("name"), "such as nvme_tcp")
		case !moduleName.MatchString(m.Name):
			r.bad(where.with("name"), "is not the name of a kernel module, such as nvme_tcp")
		}
		for n, p := range m.Parameters {
			if !moduleParameter.MatchString(p) {
				r.bad(where.with("parameters", n), "must be NAME=VALUE, or NAME alone, without blanks")
			}
		}
	}
}

func checkImageRules(c *Config, r *report) {
	for i, rule := range c.Machine.Images.Verify {
		where := at("machine", "images", "verify", i)
		if rule.Prefix == "" {
			r.lacks(where.with("prefix"), "a rule needs the images that it is for: '*' is every image")
		} else if rule.Prefix != EveryImage && strings.Contains(rule.Prefix, "*") {
			r.bad(where.with("prefix"), "is the beginning of names, without an asterisk; '*' alone is every image")
		}
		for n, key := range rule.Keys {
			if _, err := pki.ParsePublicKey(key); err != nil {
				r.bad(where.with("keys", n), "%v", err)
			}
		}
		switch {
		case len(rule.Keys) == 0 && len(rule.Authority) == 0:
			r.bad(where, "needs keys, or an authority with an identity")
		case (len(rule.Authority) == 0) != (rule.Identity == ""):
			r.bad(where, "authority and identity belong together")
		case len(rule.Authority) > 0:
			if _, err := pki.ParseCert(rule.Authority); err != nil {
				r.bad(where.with("authority"), "%v", err)
			}
		}
	}
}

func checkRegistryHost(r *report, where place, host string) {
	if bare, found := strings.CutPrefix(host, "https://"); found {
		r.bad(where, "is a host, not a URL; did you mean %s", quote(strings.TrimRight(bare, "/")))
	} else if !registryHost.MatchString(host) {
		r.bad(where, "is not the host of a registry, such as docker.io, or '*'")
	}
}

func checkEnv(c *Config, r *report) {
	for _, name := range slices.Sorted(maps.Keys(c.Machine.Env)) {
		if !envName.MatchString(name) {
			r.bad(at("machine", "env", name), "is not the name of an environment variable")
		}
	}
	spelled := map[string]string{}
	for _, name := range slices.Sorted(maps.Keys(c.Machine.Sysctls)) {
		where := at("machine", "sysctls", name)
		if !sysctlName.MatchString(name) {
			r.bad(where, "is not the name of a kernel parameter, such as vm.max_map_count")
		}
		if other, twice := spelled[SysctlPath(name)]; twice {
			r.bad(where, "is the same parameter as %s", other)
		}
		spelled[SysctlPath(name)] = name
	}
	for _, name := range slices.Sorted(maps.Keys(c.Machine.Sysfs)) {
		if !fs.ValidPath(name) || !strings.Contains(name, "/") {
			r.bad(at("machine", "sysfs", name), "is not a path below /sys, such as block/sda/queue/scheduler")
		}
	}
}

// maxKeySlot is the last of LUKS2's 32 key slots.
const maxKeySlot = 31

func checkEncryption(c *Config, r *report) {
	for _, p := range []struct {
		name string
		enc  *Encryption
	}{{"state", c.Machine.SystemDiskEncryption.State}, {"ephemeral", c.Machine.SystemDiskEncryption.Ephemeral}} {
		if p.enc == nil {
			continue
		}
		where := at("machine", "systemDiskEncryption", p.name, "keys")
		if len(p.enc.Keys) == 0 {
			r.lacks(where, "an encrypted partition needs at least one")
		}
		slots := map[int]bool{}
		for i, key := range p.enc.Keys {
			if (key.NodeID == nil) == (key.Static == nil) {
				r.bad(where.with(i), "needs exactly one of nodeID and static")
			}
			if key.Static != nil && key.Static.Passphrase == "" {
				r.lacks(where.with(i, "static", "passphrase"), "")
			}
			switch {
			case key.Slot == nil:
				r.lacks(where.with(i, "slot"), "every key has its slot, 0 to 31")
			case *key.Slot < 0 || *key.Slot > maxKeySlot:
				r.bad(where.with(i, "slot"), "%d is out of range (0 to %d)", *key.Slot, maxKeySlot)
			case slots[*key.Slot]:
				r.bad(where.with(i, "slot"), "%d is already taken by another key", *key.Slot)
			default:
				slots[*key.Slot] = true
			}
		}
	}
}
