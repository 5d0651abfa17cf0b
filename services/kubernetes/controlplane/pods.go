package controlplane

import (
	"embed"
	"fmt"
	"maps"
	"net/netip"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/core/render"
	"github.com/garboard-os/garboard/services/kubernetes/kubeclient"
)

// object and list are the types in which pods are written here.
type (
	object = map[string]any
	list   = []any
)

// Annotations of a static pod.
const (
	configVersionAnnotation  = "garboard.dev/config-version"  // version of the KubernetesControlPlaneConfig
	secretsVersionAnnotation = "garboard.dev/secrets-version" // content hash of the secret files
	filesVersionAnnotation   = "garboard.dev/files-version"   // content hash of the other files; kube-apiserver only
)

//go:embed static_pods
var staticPodFiles embed.FS

// staticPods are the pod, and for each program its flags and what is its own in the pod.
var staticPods = render.Parse(staticPodFiles, "static_pods/*.yaml")

// podInput is all data of a static pod.
type podInput struct {
	program        string
	cluster        *config.Cluster
	configVersion  uint64
	secretsVersion string
	issuers        []string   // of tokens that are accepted; the first one signs
	address        netip.Addr // this node's, of the first family of Services, for the apiserver to advertise
	secretsDir     string
	filesDir       string
	auditDir       string
}

// staticPod renders the pod of one program. A pod together with an error is good: see apiServerFiles.
func staticPod(in podInput) (kubeclient.Object, error) {
	c, name := in.cluster, in.program
	image, args, volumes := in.own()
	secrets, files := filepath.Join(in.secretsDir, name), filepath.Join(in.filesDir, name)
	annotations := object{
		configVersionAnnotation:  strconv.FormatUint(in.configVersion, 10),
		secretsVersionAnnotation: in.secretsVersion,
	}
	var unread error
	ipv6, services := in.address.Is6(), config.Joined(c.Network.ServiceSubnets, ",")
	own := []config.Volume{inPlace(secrets, true)}
	if name == apiServer {
		ipv6 = ipv6 || strings.Contains(services, ":")
		var rendered map[string][]byte
		if rendered, unread = apiServerFiles(&c.APIServer); rendered == nil {
			return nil, unread
		}
		annotations[filesVersionAnnotation] = filesVersion(rendered)
		args = withoutAuthentication(args)
		for _, flag := range []string{"service-account-issuer", "api-audiences"} {
			if _, own := args[flag]; !own && len(in.issuers) > 1 {
				args[flag] = in.issuers
			}
		}
		own = append(own, inPlace(files, true), inPlace(in.auditDir, false))
	}
	own = slices.DeleteFunc(own, func(v config.Volume) bool { // the user's replace those of the same path in the pod
		return slices.ContainsFunc(volumes, func(extra config.Volume) bool { return extra.MountPath == v.MountPath })
	})
	mounts, sources := list{}, list{}
	for i, v := range append(own, volumes...) {
		name := fmt.Sprintf("v%d", i)
		mounts = append(mounts, object{"name": name, "mountPath": v.MountPath, "readOnly": v.ReadOnly})
		sources = append(sources, object{"name": name, "hostPath": object{"path": v.HostPath}})
	}
	data := object{
		"Name": name, "Namespace": kubeSystem, "Annotations": annotations, "UID": boot.User(name), "Image": image,
		"Mounts": mounts, "Volumes": sources, "Address": in.address, "IPv6": ipv6, "EtcdServers": localEtcd,
		"LocalPort": c.ControlPlane.LocalAPIServerPort, "Endpoint": c.ControlPlane.Endpoint.String(),
		"ServiceCIDR": services, "PodCIDR": config.Joined(c.Network.PodSubnets, ","),
		"Secrets": secrets, "Files": files, "Audit": in.auditDir, "Port": args.Get("secure-port"),
		"Webhook": args.Get("authorization-webhook-config-file"), "ABAC": args.Get("authorization-policy-file"),
		"NodeRestriction": !strings.Contains(args.Get("disable-admission-plugins"), "NodeRestriction"),
		"OneSigner":       args.Excludes("cluster-signing-cert-file"),
	}
	var program struct {
		Flags map[string]string
		Pod   object // what is its own in it
	}
	var pod object
	err := staticPods.YAML(name+".yaml", data, &program)
	if err == nil {
		maps.DeleteFunc(program.Flags, func(flag, _ string) bool { return args.Excludes(flag) != "" })
		data["Program"], data["Command"] = program.Pod, args.CommandLine(name, program.Flags)
		err = staticPods.YAML("pod.yaml", data, &pod)
	}
	if err != nil {
		return nil, fmt.Errorf("render static pod %s: %w", name, err)
	}
	return pod, unread
}

// own is what the configuration says of the program itself.
func (in podInput) own() (image string, args config.Args, volumes []config.Volume) {
	switch c := in.cluster; in.program {
	case apiServer:
		return c.APIServer.Image, c.APIServer.ExtraArgs, c.APIServer.ExtraVolumes
	case controllerManager:
		return c.ControllerManager.Image, c.ControllerManager.ExtraArgs, c.ControllerManager.ExtraVolumes
	default:
		return c.Scheduler.Image, c.Scheduler.ExtraArgs, c.Scheduler.ExtraVolumes
	}
}

// inPlace is a path of the node that the pod has at the same place.
func inPlace(path string, readOnly bool) config.Volume {
	return config.Volume{HostPath: path, MountPath: path, ReadOnly: readOnly}
}
