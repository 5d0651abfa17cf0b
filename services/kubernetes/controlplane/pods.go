package controlplane

import (
	"fmt"
	"net/netip"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/kubernetes/kubeclient"
)

// object and list are the types in which pods are written here.
type (
	object = map[string]any
	list   = []any
)

// Annotations of a static pod (S-262).
const (
	configVersionAnnotation  = "garboard.dev/config-version"  // version of the KubernetesControlPlaneConfig
	secretsVersionAnnotation = "garboard.dev/secrets-version" // content hash of the secret files
	filesVersionAnnotation   = "garboard.dev/files-version"   // content hash of the other files; kube-apiserver only
)

// criticalPriority is the value of the class system-node-critical. No admission
// plugin sets it for a static pod.
const criticalPriority = 2000001000

// The ports of the control plane's programs. The last two are their defaults.
const (
	controllerManagerPort = 10257
	schedulerPort         = 10259
)

// tlsMinVersion: all of Kubernetes' own clients support TLS 1.3.
const tlsMinVersion = "VersionTLS13"

// leaderRetry is how often a program tries for the lease. The first attempt is before
// the apiserver is up, and the next one ends the wait of the whole start: at the
// default of 2 s (and up to 2.2 times that, by jitter) it was 3 s after the apiserver.
// It costs one more write to etcd every two seconds for each of the two leaders.
const leaderRetry = "1s"

// podInput is all data of a static pod.
type podInput struct {
	config         ProgramConfig
	configVersion  uint64
	secretsVersion string
	address        netip.Addr // this node's, of the first family of Services, for the apiserver to advertise
	secretsDir     string
	filesDir       string
	auditDir       string
}

// staticPod renders the pod of one program.
func staticPod(in podInput) (kubeclient.Object, error) {
	secrets := filepath.Join(in.secretsDir, in.config.program())
	files := filepath.Join(in.filesDir, in.config.program())
	switch c := in.config.(type) {
	case APIServerConfig:
		rendered, err := apiServerFiles(c)
		if err != nil {
			return nil, err
		}
		flags := apiServerFlags(c, secrets, files, in.auditDir, in.address)
		if _, own := c.ExtraArgs["anonymous-auth"]; own {
			delete(flags, "authentication-config") // the apiserver accepts only one of the two
		}
		return in.pod(container{
			image:   c.Image,
			command: arguments(apiServer, flags, c.ExtraArgs),
			cpu:     "200m", memory: "256Mi",
			mounts:       []config.Volume{inPlace(secrets, true), inPlace(files, true), inPlace(in.auditDir, false)},
			extra:        c.ExtraVolumes,
			filesVersion: filesVersion(rendered),
			port:         c.LocalPort,
			// A restarted one would get no more from an etcd without quorum, and this
			// one still serves its cache.
			live:  "/livez?exclude=etcd",
			ready: "/readyz",
		}), nil
	case ControllerManagerConfig:
		return in.pod(container{
			image:   c.Image,
			command: arguments(controllerManager, controllerManagerFlags(c, secrets), c.ExtraArgs),
			cpu:     "50m", memory: "64Mi",
			mounts: []config.Volume{inPlace(secrets, true)},
			extra:  c.ExtraVolumes,
			port:   controllerManagerPort,
			live:   "/healthz",
			ready:  "/healthz",
		}), nil
	case SchedulerConfig:
		return in.pod(container{
			image:   c.Image,
			command: arguments(scheduler, schedulerFlags(secrets), c.ExtraArgs),
			cpu:     "20m", memory: "32Mi",
			mounts: []config.Volume{inPlace(secrets, true)},
			extra:  c.ExtraVolumes,
			port:   schedulerPort,
			live:   "/livez",
			ready:  "/readyz",
		}), nil
	}
	return nil, fmt.Errorf("render static pod: unknown program %T", in.config)
}

// inPlace is a path of the node that the pod has at the same place.
func inPlace(path string, readOnly bool) config.Volume {
	return config.Volume{HostPath: path, MountPath: path, ReadOnly: readOnly}
}

// container is what differs between the pods.
type container struct {
	image       string
	command     list
	cpu, memory string // requests
	mounts      []config.Volume
	extra       []config.Volume // of the user: they replace those of the same path in the pod
	port        int
	live, ready string // paths of the probes

	filesVersion string // "" for a program without files
}

func (in podInput) pod(c container) kubeclient.Object {
	name := in.config.program()
	uid := boot.User(name)
	capabilities := object{"drop": list{"ALL"}}
	if name == apiServer {
		// The publisher's program has it in its file, for ports below 1024, and doesn't start where it may not. A
		// program without it there, such as ours, doesn't get it: it isn't root.
		capabilities["add"] = list{"NET_BIND_SERVICE"}
	}
	annotations := object{
		configVersionAnnotation:  strconv.FormatUint(in.configVersion, 10),
		secretsVersionAnnotation: in.secretsVersion,
	}
	if c.filesVersion != "" {
		annotations[filesVersionAnnotation] = c.filesVersion
	}
	mounts, hostPaths := list{}, list{}
	own := slices.DeleteFunc(c.mounts, func(v config.Volume) bool {
		return slices.ContainsFunc(c.extra, func(extra config.Volume) bool { return extra.MountPath == v.MountPath })
	})
	for i, v := range append(own, c.extra...) {
		volume := "v" + strconv.Itoa(i)
		mounts = append(mounts, object{"name": volume, "mountPath": v.MountPath, "readOnly": v.ReadOnly})
		// Without a type, because the kubelet would check it in its own mount namespace.
		hostPaths = append(hostPaths, object{"name": volume, "hostPath": object{"path": v.HostPath}})
	}
	return kubeclient.Object{
		"apiVersion": "v1",
		"kind":       "Pod",
		"metadata": object{
			"name":              name,
			"namespace":         kubeSystem,
			"creationTimestamp": nil,
			"labels":            object{"k8s-app": name, "tier": "control-plane"},
			"annotations":       annotations,
		},
		"spec": object{
			"hostNetwork":       true,
			"priority":          criticalPriority,
			"priorityClassName": "system-node-critical",
			"securityContext":   object{"runAsNonRoot": true, "runAsUser": uid, "runAsGroup": uid, "seccompProfile": object{"type": "RuntimeDefault"}},
			"containers": list{object{
				"name":           name,
				"image":          c.image,
				"command":        c.command,
				"resources":      object{"requests": object{"cpu": c.cpu, "memory": c.memory}},
				"startupProbe":   probe(c.port, c.live, startup),
				"livenessProbe":  probe(c.port, c.live, liveness),
				"readinessProbe": probe(c.port, c.ready, readiness),
				"volumeMounts":   mounts,
				// The reason of a failure outlives the container, whose log the kubelet removes.
				"terminationMessagePolicy": "FallbackToLogsOnError",
				"securityContext": object{
					"allowPrivilegeEscalation": false,
					"capabilities":             capabilities,
					"readOnlyRootFilesystem":   true,
				},
			}},
			"volumes": hostPaths,
		},
		"status": object{},
	}
}

// timing of a probe, in seconds and tries.
type timing struct{ period, timeout, failures int }

var (
	// startup gives 15 minutes: an emulated machine of two CPUs needs several for its
	// first start. Every second, because a node is Ready only after it.
	startup = timing{period: 1, timeout: 15, failures: 900}
	// liveness restarts a program that hasn't answered for more than a minute; a
	// slow one isn't restarted.
	liveness  = timing{period: 10, timeout: 15, failures: 8}
	readiness = timing{period: 5, timeout: 15, failures: 3}
)

func probe(port int, path string, t timing) object {
	return object{
		"httpGet":          object{"scheme": "HTTPS", "host": "127.0.0.1", "port": port, "path": path},
		"periodSeconds":    t.period,
		"timeoutSeconds":   t.timeout,
		"failureThreshold": t.failures,
	}
}

// Limits of the audit log: rotated files are compressed to about a tenth, so
// all of them take about 200 MB.
const (
	auditFileMB = "100"
	auditFiles  = "10"
	auditDays   = "30"
)

func apiServerFlags(c APIServerConfig, secrets, files, audit string, address netip.Addr) map[string]string {
	bind := "0.0.0.0"
	if address.Is6() || strings.Contains(c.ServiceCIDR, ":") {
		bind = "::" // accepts IPv4 too
	}
	return map[string]string{
		"admission-control-config-file": files + "/" + admissionFile,
		"advertise-address":             address.String(),
		"allow-privileged":              "true",
		"api-audiences":                 c.ControlPlaneEndpoint,
		"audit-log-compress":            "true",
		"audit-log-maxage":              auditDays,
		"audit-log-maxbackup":           auditFiles,
		"audit-log-maxsize":             auditFileMB,
		"audit-log-path":                audit + "/" + apiServer + ".log",
		"audit-policy-file":             files + "/" + auditFile,
		// Anonymous requests only for the health endpoints, which the probes request.
		"authentication-config":              files + "/authentication.yaml",
		"authorization-mode":                 "Node,RBAC",
		"bind-address":                       bind,
		"client-ca-file":                     secrets + "/ca.crt",
		"enable-admission-plugins":           "NodeRestriction",
		"enable-bootstrap-token-auth":        "true",
		"encryption-provider-config":         secrets + "/encryption.yaml",
		"etcd-cafile":                        secrets + "/etcd-client-ca.crt",
		"etcd-certfile":                      secrets + "/etcd-client.crt",
		"etcd-keyfile":                       secrets + "/etcd-client.key",
		"etcd-servers":                       strings.Join(c.EtcdServers, ","),
		"kubelet-certificate-authority":      secrets + "/ca.crt",
		"kubelet-client-certificate":         secrets + "/apiserver-kubelet-client.crt",
		"kubelet-client-key":                 secrets + "/apiserver-kubelet-client.key",
		"kubelet-preferred-address-types":    "InternalIP,ExternalIP,Hostname",
		"profiling":                          "false",
		"proxy-client-cert-file":             secrets + "/front-proxy-client.crt",
		"proxy-client-key-file":              secrets + "/front-proxy-client.key",
		"requestheader-allowed-names":        "front-proxy-client",
		"requestheader-client-ca-file":       secrets + "/aggregator-ca.crt",
		"requestheader-extra-headers-prefix": "X-Remote-Extra-",
		"requestheader-group-headers":        "X-Remote-Group",
		"requestheader-username-headers":     "X-Remote-User",
		"secure-port":                        strconv.Itoa(c.LocalPort),
		// A token of a pod ends after an hour, and isn't valid for a year because its client may be an old one.
		"service-account-extend-token-expiration": "false",
		"service-account-issuer":                  c.ControlPlaneEndpoint,
		"service-account-key-file":                secrets + "/service-account.pub",
		"service-account-signing-key-file":        secrets + "/service-account.key",
		"service-cluster-ip-range":                c.ServiceCIDR,
		// A client with an open connection at the end is asked to retry, and closes it:
		// otherwise it keeps the connection until the termination grace period is over.
		"shutdown-send-retry-after": "true",
		"tls-cert-file":             secrets + "/apiserver.crt",
		"tls-min-version":           tlsMinVersion,
		"tls-private-key-file":      secrets + "/apiserver.key",
	}
}

func controllerManagerFlags(c ControllerManagerConfig, secrets string) map[string]string {
	return map[string]string{
		"allocate-node-cidrs":       "true",
		"authentication-kubeconfig": secrets + "/kubeconfig",
		// Without it the program ends while the apiserver is down, and is restarted with growing pauses.
		"authentication-tolerate-lookup-failure": "true",
		"authorization-kubeconfig":               secrets + "/kubeconfig",
		"bind-address":                           "127.0.0.1",
		"cloud-provider":                         c.CloudProvider,
		"cluster-cidr":                           c.PodCIDR,
		"cluster-signing-cert-file":              secrets + "/ca.crt",
		"cluster-signing-key-file":               secrets + "/ca.key",
		"configure-cloud-routes":                 "false",
		"controllers":                            "*,tokencleaner",
		// Each controller requests its own token: at the default of 20 requests a
		// second that takes 5 seconds, in which no node can join.
		"kube-api-burst":                   "200",
		"kube-api-qps":                     "100",
		"kubeconfig":                       secrets + "/kubeconfig",
		"leader-elect":                     "true",
		"leader-elect-retry-period":        leaderRetry,
		"profiling":                        "false",
		"root-ca-file":                     secrets + "/root-ca.crt",
		"service-account-private-key-file": secrets + "/service-account.key",
		"service-cluster-ip-range":         c.ServiceCIDR,
		"tls-min-version":                  tlsMinVersion,
		"use-service-account-credentials":  "true",
	}
}

func schedulerFlags(secrets string) map[string]string {
	return map[string]string{
		"authentication-kubeconfig":              secrets + "/kubeconfig",
		"authentication-tolerate-lookup-failure": "true",
		"authorization-kubeconfig":               secrets + "/kubeconfig",
		"bind-address":                           "127.0.0.1",
		"kubeconfig":                             secrets + "/kubeconfig",
		"leader-elect":                           "true",
		"leader-elect-retry-period":              leaderRetry,
		"profiling":                              "false",
		"tls-min-version":                        tlsMinVersion,
	}
}
