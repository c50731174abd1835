{{- define "kpl.selector" -}}
app.kubernetes.io/name: kpl-gateway
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "kpl.labels" -}}
{{ include "kpl.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- define "kpl.serviceAccount" -}}
{{ .Values.serviceAccount.name | default (ternary .Release.Name "default" .Values.serviceAccount.create) }}
{{- end }}

{{/* MiB of memory: the figures of the page "Size the ingest gateway", for all workers of a pod. */}}
{{- define "kpl.memoryRequest" -}}
{{ mul (int .Values.workers) (add 100 (div (mul 4 (int64 .Values.maxOutstandingBytes)) 1048576)) }}
{{- end }}
{{- define "kpl.memoryLimit" -}}
{{ div (mul 6 (add (include "kpl.memoryRequest" . | int64) (mul (int .Values.workers) 256))) 5 }}
{{- end }}
